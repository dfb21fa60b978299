"""Output folders of commands, checked before anything runs."""

import os
from pathlib import Path
from typing import Annotated

import typer

from gossamer.bench.cli.errors import FailedError, InputError
from gossamer.core import files
from gossamer.core.errors import OutputError

Force = Annotated[bool, typer.Option("--force", help="Write over files that gossamer did not write.")]
RECORD, PAGE = "record.json", "report.html"  # in the folder of a run


def run_folder(folder: Path, force: bool) -> None:
    """Make the folder of a run. Refuse files that gossamer did not write, or remove them with `force`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FailedError(
            f"the folder {folder} cannot be made: {error.strerror}; give another one with --out"
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FailedError(f"the folder {folder} cannot be written to; give another one with --out")
    for path, kind in run_files(folder).items():
        try:
            files.writable(path, kind, force)
        except OutputError as error:
            raise InputError(f"{error}; give another folder with --out, or --force") from None
    if force:
        for path, kind in run_files(folder).items():
            if not files.is_ours(files.writable(path, kind, force), kind):
                path.unlink(missing_ok=True)


def run_files(folder: Path) -> dict[Path, files.FileKind]:
    from gossamer.bench import record
    from gossamer.bench.report import page  # brings jinja, which takes a while

    return {folder / RECORD: record.RECORD, folder / PAGE: page.PAGE}
