"""gossamer report: one page of a run's record."""

import os
from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.errors import FailedError, InputError
from gossamer.record import Record


def report(
    record: Annotated[Path, typer.Argument(help="The record.json of a run, or the run's folder.")],
    out: Annotated[Path | None, typer.Option(help="The page; beside the record by default.")] = None,
    markdown: Annotated[bool, typer.Option(help="Print a Markdown table instead.")] = False,
    figures: Annotated[Path | None, typer.Option(help="A folder for SVG and PNG figures.")] = None,
) -> None:
    """Make the report of a run: one HTML file that works offline."""
    from gossamer import report as pages

    source = record / "record.json" if os.path.isdir(record) else record  # unlike is_dir(), it bears every name
    made = read(source)
    if markdown:
        print(pages.write_markdown(made))
        return
    page = out or source.with_name("report.html")
    try:
        pages.write_html(made, page)
        print(page)
        if figures is not None:
            pages.write_figures(made, figures)
            print(figures)
    except OSError as error:
        raise FailedError(f"{error.filename or page} could not be written: {error.strerror}") from None


def read(source: Path) -> Record:
    try:
        return Record.read(source)
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror}; 'gossamer compare' writes such files") from None
    except ValueError as error:
        raise InputError(f"{source} is no record of a run: {error}") from None
