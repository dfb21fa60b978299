"""gossamer report: make a page from the record of a run."""

import os
from pathlib import Path
from typing import Annotated

import typer

from gossamer.bench.cli.errors import InputError
from gossamer.bench.cli.output import PAGE, RECORD, Force, writing
from gossamer.bench.record import Record
from gossamer.bench.report import tuned, write_figures, write_html, write_markdown
from gossamer.bench.report.beside import beside
from gossamer.bench.report.markdown import AUTHOR, MARKDOWN
from gossamer.bench.tune import Tuning, is_tuning
from gossamer.core import files

TOGETHER = "together.html"  # file name of a page of several records; each record keeps its own page


def report(
    records: Annotated[
        list[Path], typer.Argument(help="The record.json of a run, or the run's folder; several go on one page.")
    ],
    out: Annotated[Path | None, typer.Option(help="A file, or a folder for it; beside the record by default.")] = None,
    markdown: Annotated[bool, typer.Option(help="A Markdown table instead; printed, if there is no --out.")] = False,
    figures: Annotated[Path | None, typer.Option(help="A folder for SVG and PNG figures.")] = None,
    force: Force = False,
) -> None:
    """Make the report of a run: one HTML file that works offline. Of several runs, one page with all of them."""
    sources = [r / RECORD if os.path.isdir(r) else r for r in records]  # unlike Path.is_dir(), it raises for no name
    found = _together(sources) if len(sources) > 1 else _read(sources[0])
    if figures is not None and isinstance(found, Tuning):
        raise InputError("a search has one figure, which is on its page: leave out --figures")
    name = "report.md" if markdown else PAGE if len(sources) == 1 else TOGETHER
    page = out / name if out and os.path.isdir(out) else out or sources[0].with_name(name)
    text = "" if not markdown else tuned.write_markdown(found) if isinstance(found, Tuning) else write_markdown(found)
    with writing(page):
        if markdown and out:
            files.write(page, AUTHOR + text, MARKDOWN, force)
        elif not markdown:
            tuned.write_html(found, page, force) if isinstance(found, Tuning) else write_html(found, page, force)
    print(page if out or not markdown else text)
    if figures is not None and isinstance(found, Record):
        with writing(figures):
            write_figures(found, figures, force=force)
        print(figures)


def _together(sources: list[Path]) -> Record:
    if any(map(is_tuning, sources)):
        raise InputError("the record of a search gets its own page: give it alone")
    return beside([found for source in sources if isinstance(found := _read(source), Record)])


def _read(source: Path) -> Record | Tuning:
    try:
        return Tuning.read(source) if is_tuning(source) else Record.read(source)
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror}; 'gossamer compare' writes records") from None
    except ValueError as error:
        raise InputError(f"{source} is not a record of a run: {error}") from None
