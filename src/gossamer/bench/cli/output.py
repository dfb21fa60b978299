"""Files and folders that commands write: checked before anything runs, with errors that say what to do instead."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from gossamer.bench import cli, record
from gossamer.bench.cli.errors import FailedError, InputError
from gossamer.bench.report import pages
from gossamer.core import files
from gossamer.core.errors import OutputError

Force = Annotated[bool, typer.Option("--force", help="Write over files that gossamer did not write.")]
RECORD, PAGE = "record.json", "report.html"  # in the folder of a run


@contextmanager
def writing(path: Path, instead: str = "give another place, or --force") -> Generator[None]:
    """Say what to do where a file must not be written, and why it could not be."""
    try:
        yield
    except OutputError as error:
        raise InputError(f"{error}; {instead}") from None
    except OSError as error:
        raise FailedError(f"{error.filename or path} could not be written: {error.strerror or error}") from None


def made_folder(folder: Path, option: str = "--out") -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_be_made(folder, error, option) from None
    return folder


def _cannot_be_made(folder: Path, error: OSError, option: str) -> FailedError:
    return FailedError(f"the folder {folder} cannot be made: {error.strerror}; give another one with {option}")


def new_folder(folder: Path) -> Path:
    """Make a folder of this name, or of this name and a number: commands that start in one second share none."""
    for name in (folder.name, *(f"{folder.name}-{i}" for i in range(2, 100))):
        made = folder.with_name(name)
        try:
            made.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise _cannot_be_made(made, error, "--out") from None
        return made
    raise FailedError(f"the folder {folder} is taken, and so are those of its name with a number; give one with --out")


def run_folder(folder: Path, force: bool) -> None:
    """Make the folder of a run. Refuse files that gossamer did not write, or remove them with `force`."""
    made_folder(folder)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FailedError(f"the folder {folder} cannot be written to; give another one with --out")
    kinds = {folder / RECORD: record.RECORD, folder / PAGE: pages.PAGE}
    for path, kind in kinds.items():
        with writing(path, "give another folder with --out, or --force"):
            files.writable(path, kind, force)
    for path, kind in kinds.items() if force else ():
        if not files.is_ours(files.writable(path, kind, force), kind):
            path.unlink(missing_ok=True)


def hold(path: Path, option: str = "--out") -> None:
    """Refuse a folder or a record that another command writes to. The lock goes when this one ends, however that comes."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    locked, flags = path, os.O_RDONLY
    if not os.path.isdir(path):  # a record is replaced whole each time; Path.is_dir() raises where a name is too long
        locked, flags = path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT
    try:
        handle = os.open(locked, flags, 0o666)
        cli.at_end.callback(os.close, handle)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(
            f"another command writes to {path}: wait until it has ended, or give another folder with {option}"
        ) from None
    except OSError:  # a file system without locks
        return
    if locked != path:
        cli.at_end.callback(locked.unlink, missing_ok=True)
