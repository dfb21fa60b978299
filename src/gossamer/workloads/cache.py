"""The user's cache folder: written by one process at a time, and never seen half-written."""

import os
import tempfile
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gossamer.workloads.errors import CacheError

Arrays = Mapping[str, NDArray[np.generic]]


def folder() -> Path:
    """$GOSSAMER_CACHE, or else gossamer/ where this user's caches live."""
    own, shared = os.environ.get("GOSSAMER_CACHE"), os.environ.get("XDG_CACHE_HOME")
    path = Path(own) if own else (Path(shared) if shared else Path.home() / ".cache") / "gossamer"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CacheError(f"the cache folder cannot be made: {error}. Set GOSSAMER_CACHE to another one.") from None
    return path


@contextmanager
def lock(name: str) -> Generator[None]:
    """Only one process of this host is inside; the others wait. Freed by the system if that process dies."""
    try:
        handle = (folder() / f"{name}.lock").open("w")
    except OSError as error:
        raise CacheError(f"the cache folder cannot be written: {error}. Set GOSSAMER_CACHE to another one.") from None
    with handle:
        try:
            import fcntl
        except ImportError:  # Windows: several processes may do the same work, but each result is renamed whole
            pass
        else:
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def write(target: Path) -> Generator[Path]:
    """A path to write to, which becomes `target` in one step if all goes well, and vanishes if not."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".part-")
    os.close(handle)
    part = Path(name)
    try:
        yield part
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def arrays(name: str, build: Callable[[], Arrays]) -> Arrays:
    """What `build` returns, remembered. A damaged file is built again; a folder that cannot be written is done without.

    `name` must say everything that the arrays depend on.
    """
    try:
        path = folder() / f"{name}.npz"
        found = _read(path)
        if found is None:
            with lock(name):
                found = _read(path)  # another process may have been faster
                if found is None:
                    found = build()
                    _remember(path, found)
        return found
    except CacheError as error:
        warnings.warn(f"nothing is remembered: {error}", stacklevel=2)
        return build()


def _remember(path: Path, made: Arrays) -> None:
    try:
        with write(path) as part, part.open("wb") as file:
            np.savez(file, **made)  # pyright: ignore[reportArgumentType]
    except OSError as error:  # a full disk, say: the data is there all the same
        warnings.warn(f"{path} could not be written: {error}", stacklevel=3)


def _read(path: Path) -> Arrays | None:
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except Exception:  # no file, or a damaged archive, which raises whatever zip, zlib or numpy met first
        return None
