"""The user's cache folder: written by one process at a time, and never seen half-written."""

import os
import tempfile
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gossamer.workloads.errors import DataError

Arrays = Mapping[str, NDArray[np.generic]]


def folder() -> Path:
    """$GOSSAMER_CACHE, or else gossamer/ where this user's caches live."""
    own, shared = os.environ.get("GOSSAMER_CACHE"), os.environ.get("XDG_CACHE_HOME")
    path = Path(own) if own else (Path(shared) if shared else Path.home() / ".cache") / "gossamer"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"the cache folder cannot be made: {error}. Set GOSSAMER_CACHE to another one.") from None
    return path


@contextmanager
def lock(name: str) -> Generator[None]:
    """Only one process of this host is inside; the others wait. Freed by the system if that process dies."""
    with (folder() / f"{name}.lock").open("w") as handle:
        try:
            import fcntl
        except ImportError:  # Windows: several processes may do the same work, but each result is renamed whole
            yield
            return
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
        if (found := _read(path)) is not None:
            return found
        with lock(name):
            if (found := _read(path)) is not None:  # another process was faster
                return found
            made = build()
            with write(path) as part, part.open("wb") as file:
                np.savez(file, **made)  # pyright: ignore[reportArgumentType]
            return made
    except OSError as error:
        warnings.warn(f"nothing is cached: {error}", stacklevel=2)
        return build()


def _read(path: Path) -> Arrays | None:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except FileNotFoundError:
        return None
    except Exception:  # a damaged archive raises whatever zip, zlib or numpy met first
        return None
