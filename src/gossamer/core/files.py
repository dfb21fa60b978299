"""Reads and writes files safely: never overwrites files of others, never reads more than a limit.

We write where nothing is, or over a file of ours, which its first bytes say. Another's file stays as it is unless its
owner insists, and what is no regular file is never written over. We read regular files only, and up to a limit: a pipe
or a device may have no end.
"""

import errno
import os
import stat
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from gossamer.core.errors import OutputError

HEAD = 1024  # bytes of a file in which a mark is looked for
_NO_LINK, _NO_WAIT = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_NONBLOCK", 0)  # Windows has neither
_SPECIAL = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a link"}


class FileKind(NamedTuple):
    """A kind of file that gossamer writes, and the byte marks in its head, any of which identifies it."""

    name: str
    marks: tuple[bytes, ...]


def writable(path: Path, kind: FileKind, force: bool = False) -> Path:
    """The path to write to: `path`, or the gossamer file that it links to. Raises OutputError if it must not be written."""
    mode = _mode(path)
    if mode is None:
        return path
    if stat.S_ISLNK(mode):
        target = Path(os.path.realpath(path))
        if not is_ours(target, kind):
            raise OutputError(f"{path} is a link to {target}, which is no {kind.name}; name the file itself")
        return target
    if not stat.S_ISREG(mode):
        raise OutputError(f"{path} is {_SPECIAL.get(stat.S_IFMT(mode), 'a device')}, and only files are written over")
    if not force and not is_ours(path, kind):
        raise OutputError(f"{path} is there already, and is no {kind.name} that gossamer wrote; it stays as it is")
    return path


def is_ours(path: Path, kind: FileKind) -> bool:
    """True if `path` is a regular file with one of the marks in its head."""
    try:
        with _opened(path, _NO_LINK) as file:
            head = file.read(HEAD)
    except OSError:
        return False
    return any(mark in head for mark in kind.marks)


def write(path: Path, content: str | bytes, kind: FileKind, force: bool = False) -> None:
    """Write a file atomically."""
    with replacing(path, kind, force) as file:
        # Names of files, which pages repeat, may hold bytes that are no text.
        file.write(content if isinstance(content, bytes) else content.encode(errors="backslashreplace"))


@contextmanager
def replacing(path: Path, kind: FileKind, force: bool = False) -> Generator[BinaryIO]:
    """Open a temporary file that replaces `path` atomically, so that a full disk or a power cut keeps the old file."""
    target = writable(path, kind, force)
    half = target.with_name(f".gossamer-{target.stem[:40]}-{uuid.uuid4().hex[:8]}.part")
    try:
        with open(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(half, target)
    except BaseException as error:
        half.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(half):
            error.filename, error.filename2 = str(path), None  # the user knows only this name
        raise


def half_written(folder: Path, stems: str) -> list[Path]:
    """The temporary files left by killed writers, for target files with these stems (a glob)."""
    return list(folder.glob(f".gossamer-{stems}-????????.part"))


def read(path: Path, most: int) -> str:
    """Read a text file of at most `most` bytes; raises OSError otherwise."""
    try:
        with _opened(path) as file:
            if os.fstat(file.fileno()).st_size > most:
                raise OSError(errno.EFBIG, f"it is larger than {most / 1e6:g} MB")
            return file.read(most).decode("utf-8")
    except UnicodeDecodeError:
        raise
    except ValueError as error:  # a name that holds a zero byte
        raise OSError(errno.EINVAL, str(error)) from None


@contextmanager
def _opened(path: Path, flags: int = 0) -> Generator[BinaryIO]:
    """Open a regular file without blocking on a pipe."""
    with open(os.open(path, os.O_RDONLY | _NO_WAIT | flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        yield file


def _mode(path: Path) -> int | None:
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return None
