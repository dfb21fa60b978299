"""gossamer bench: how fast the kernels are, and what a step costs."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(help="Measure kernels, or whole steps.", no_args_is_help=True)


@app.command()
def kernels(
    elements: Annotated[int, typer.Option(help="Length of the float32 vector.")] = 25_600_000,
    rounds: Annotated[int, typer.Option(help="The best of so many medians counts.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Every kernel beside libc's memcpy of the same array: GB/s of float32 input, one thread."""
    from gossamer.kernels.bench import measure

    rows = [r._asdict() for r in measure(elements, rounds)]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table("kernel", "backend", "GB/s", "of memcpy", box=None, pad_edge=False)
    for r in rows:
        table.add_row(r["kernel"], r["backend"], f"{r['gb_per_s']:.2f}", f"{r['ratio_to_memcpy']:.2f}")
    Console().print(table)
