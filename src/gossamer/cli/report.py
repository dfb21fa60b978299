"""gossamer report: one page of a run's record."""

import os
from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.errors import FailedError, InputError
from gossamer.cli.out import PAGE, RECORD, Force
from gossamer.core import files
from gossamer.core.errors import OutputError
from gossamer.record import Record


def report(
    record: Annotated[Path, typer.Argument(help="The record.json of a run, or the run's folder.")],
    out: Annotated[Path | None, typer.Option(help="A file, or a folder for it; beside the record by default.")] = None,
    markdown: Annotated[bool, typer.Option(help="A Markdown table instead; printed, if there is no --out.")] = False,
    figures: Annotated[Path | None, typer.Option(help="A folder for SVG and PNG figures.")] = None,
    force: Force = False,
) -> None:
    """Make the report of a run: one HTML file that works offline."""
    from gossamer import report as pages
    from gossamer.report.markdown import AUTHOR, MARKDOWN

    source = record / RECORD if os.path.isdir(record) else record  # unlike is_dir(), it bears every name
    made = read(source)
    name = "report.md" if markdown else PAGE
    page = out / name if out and os.path.isdir(out) else out or source.with_name(name)
    try:
        if not markdown:
            pages.write_html(made, page, force)
        elif out:
            files.write(page, AUTHOR + pages.write_markdown(made), MARKDOWN, force)
        print(pages.write_markdown(made) if markdown and not out else page)
        if figures is not None:
            pages.write_figures(made, figures, force=force)
            print(figures)
    except OutputError as error:
        raise InputError(f"{error}; give another place, or --force") from None
    except OSError as error:
        raise FailedError(f"{error.filename or page} could not be written: {error.strerror}") from None


def read(source: Path) -> Record:
    try:
        return Record.read(source)
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror}; 'gossamer compare' writes such files") from None
    except ValueError as error:
        raise InputError(f"{source} is no record of a run: {error}") from None
