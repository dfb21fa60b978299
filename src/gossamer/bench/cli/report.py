"""gossamer report: make a page from the record of a run."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import typer

from gossamer.bench.cli.errors import FailedError, InputError
from gossamer.bench.cli.output import PAGE, RECORD, Force
from gossamer.bench.record import Record
from gossamer.bench.tune import Tuning, is_tuning
from gossamer.core import files
from gossamer.core.errors import OutputError

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
    from gossamer.bench.report.markdown import AUTHOR, MARKDOWN

    sources = [r / RECORD if os.path.isdir(r) else r for r in records]  # unlike Path.is_dir(), it raises for no name
    source = sources[0]
    pages = _pages(source) if len(sources) == 1 else _together(sources)
    if figures is not None and isinstance(pages, TuningPages):
        raise InputError("a search has one figure, which is on its page: leave out --figures")
    name = "report.md" if markdown else PAGE if len(sources) == 1 else TOGETHER
    page = out / name if out and os.path.isdir(out) else out or source.with_name(name)
    try:
        if not markdown:
            pages.write_html(page, force)
        elif out:
            files.write(page, AUTHOR + pages.as_markdown(), MARKDOWN, force)
        print(pages.as_markdown() if markdown and not out else page)
        if figures is not None:
            pages.write_figures(figures, force)
            print(figures)
    except OutputError as error:
        raise InputError(f"{error}; give another place, or --force") from None
    except OSError as error:
        raise FailedError(f"{error.filename or page} could not be written: {error.strerror}") from None


class Pages(Protocol):
    """Pages that can be made from a record of any command."""

    def write_html(self, path: Path, force: bool) -> None: ...
    def as_markdown(self) -> str: ...
    def write_figures(self, folder: Path, force: bool) -> None: ...


@dataclass
class ComparisonPages:
    record: Record

    def write_html(self, path: Path, force: bool) -> None:
        from gossamer.bench import report

        report.write_html(self.record, path, force)

    def as_markdown(self) -> str:
        from gossamer.bench import report

        return report.write_markdown(self.record)

    def write_figures(self, folder: Path, force: bool) -> None:
        from gossamer.bench import report

        report.write_figures(self.record, folder, force=force)


@dataclass
class TuningPages:
    tuning: Tuning

    def write_html(self, path: Path, force: bool) -> None:
        from gossamer.bench.report import tuned

        tuned.write_html(self.tuning, path, force)

    def as_markdown(self) -> str:
        from gossamer.bench.report import tuned

        return tuned.write_markdown(self.tuning)

    def write_figures(self, folder: Path, force: bool) -> None:
        raise NotImplementedError(f"{folder}: refused before anything is written")


def _pages(source: Path) -> Pages:
    if not is_tuning(source):
        return ComparisonPages(read(source))
    try:
        return TuningPages(Tuning.read(source))
    except ValueError as error:
        raise InputError(f"{source} is not a record of a run: {error}") from None


def _together(sources: list[Path]) -> Pages:
    from gossamer.bench.report.beside import beside

    if any(map(is_tuning, sources)):
        raise InputError("the record of a search gets its own page: give it alone")
    return ComparisonPages(beside([read(s) for s in sources]))


def read(source: Path) -> Record:
    try:
        return Record.read(source)
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror}; 'gossamer compare' writes records") from None
    except ValueError as error:
        raise InputError(f"{source} is not a record of a run: {error}") from None
