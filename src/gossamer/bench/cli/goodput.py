"""gossamer goodput: which share of the time that was paid for became steps that count."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from gossamer.bench.cli.console import console
from gossamer.bench.cli.errors import InputError
from gossamer.bench.cli.goodput_tables import as_dict, show
from gossamer.bench.cli.output import Force, writing
from gossamer.bench.report import goodput_page
from gossamer.bench.report.pages import PAGE
from gossamer.core import files
from gossamer.costs.goodput import Goodput, goodput_of
from gossamer.costs.quantities import hourly


def goodput(
    folder: Annotated[Path, typer.Argument(help="The folder that was given to attach(..., events=FOLDER).")],
    price: Annotated[
        str | None, typer.Option(help="Of what one rank runs on: '2.10/hour', or with a currency '2.10 USD/hour'.")
    ] = None,
    pays: Annotated[
        Literal["machines", "processes"],
        typer.Option(help="'machines' are paid for between two processes of a rank, too; or only 'processes' are."),
    ] = "machines",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    page: Annotated[Path | None, typer.Option(help="Also write an HTML page that works offline.")] = None,
    force: Force = False,
) -> None:
    """Which share of the paid time of a run became steps that count, where the rest went, and what a step cost.

    Exit code 2, after the answer, if the last line of a file is not whole.
    """
    cost = None if price is None else hourly(price)
    if page is not None:
        with writing(page):
            files.writable(page, PAGE, force)
    found = goodput_of(folder, pays)
    if as_json:
        print(json.dumps(as_dict(found, cost), indent=1, allow_nan=False))
    else:
        show(console(), found, cost)
    if page is not None:
        with writing(page):
            files.write(page, goodput_page.render(found, cost), PAGE, force)
        print(page, file=sys.stderr if as_json else sys.stdout)
    if found.cut:
        raise InputError(_cut(found))


def _cut(found: Goodput) -> str:
    names = ", ".join(str(path) for path in found.cut)
    return (
        f"{names}: the last line is cut off, as by a full disk or a power cut. It was left out, and at most the last second of "
        "that process is missing above; take the line out, and all is well"
    )
