"""The user's cache folder: written by one process at a time, and never seen half-written."""

import os
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from gossamer.bench.workloads.errors import CacheError

Arrays = Mapping[str, NDArray[np.generic]]
ANOTHER = "Set GOSSAMER_CACHE to a folder that can be written."


def folder() -> Path:
    """$GOSSAMER_CACHE, or else gossamer/ where this user's caches live."""
    path = _place()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CacheError(f"the cache folder {path} cannot be made: {error.strerror}. {ANOTHER}") from None
    return path


def _place() -> Path:
    own, shared = os.environ.get("GOSSAMER_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    try:
        return (Path(shared) if shared else Path.home() / ".cache") / "gossamer"
    except RuntimeError:  # neither HOME nor an entry among the system's users, as in some containers
        raise CacheError(f"this user has no home folder for a cache. {ANOTHER}") from None


@contextmanager
def lock(name: str) -> Generator[None]:
    """Only one process of this host is inside; the others wait. Freed by the system if that process dies."""
    path = folder()
    try:
        handle = (path / f"{name}.lock").open("a")  # whatever is in it stays
    except OSError as error:
        raise CacheError(f"the cache folder {path} cannot be written to: {error.strerror}. {ANOTHER}") from None
    with handle:
        # Without locks, as on Windows and on some network file systems, several may do the same work; each result is renamed whole.
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def write(target: Path) -> Generator[Path]:
    """A path to write to, which becomes `target` in one step if all goes well, and vanishes if not."""
    part = target.with_name(f".part-{uuid4().hex[:12]}")
    # Of the usual mode, and not of a temporary file's: other users may share the folder.
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
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
        made = build()  # one that needs the folder, too, says so itself
        warnings.warn(f"nothing is remembered: {error}", stacklevel=2)
        return made


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
