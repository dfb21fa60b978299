"""gossamer bench: how fast the kernels are, and what a step costs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from gossamer.trial.steps import StepRow

YARDSTICKS = ["compute", "ddp", "ddp-fp16", "ddp-powersgd"]
RECIPES = [
    *("allreduce", "bf16", "fp16", "qsgd", "terngrad", "topk", "powersgd(rank=1)", "powersgd(rank=4)", "diana"),
    *("local_sgd", "slowmo", "overlap_local_sgd", "sgp", "osgp", "backup"),
]

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


@app.command()
def steps(
    recipes: Annotated[
        list[str] | None, typer.Argument(help="All presets by default; yardsticks are always there.")
    ] = None,
    rates: Annotated[str, typer.Option(help="Rates, divided by blanks.")] = "100mbit 200mbit 1gbit unshaped",
    hosts: Annotated[int, typer.Option(help="How many hosts.")] = 4,
    turns: Annotated[int, typer.Option(help="Turns that count, per contender.")] = 6,
    chunk: Annotated[int, typer.Option(help="Steps per turn.")] = 4,
    out: Annotated[Path | None, typer.Option(help="Folder for steps.json and steps.md.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """What a step of the 5.8 M-parameter language model takes: recipes, DDP and its hooks, and computing alone.

    All train in turns in one lab; the numbers are medians over turns, with their range; bytes are per rank and step.
    """
    from gossamer.cli.progress import quiet
    from gossamer.trial.contender import check
    from gossamer.trial.steps import measure_steps

    for text in recipes or []:
        check(text)
    names = {n: n for n in [*YARDSTICKS, *(recipes or RECIPES)]}
    rows = [row for rate in rates.split() for row in measure_steps(names, rate, hosts, turns, chunk, quiet)]
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "steps.json").write_text(json.dumps([asdict(r) for r in rows], indent=1))
        (out / "steps.md").write_text(as_markdown(rows))
    print(json.dumps([asdict(r) for r in rows], indent=1) if as_json else as_markdown(rows))


def as_markdown(rows: "list[StepRow]") -> str:
    """The rows as a table, one below the other."""
    lines = [
        "| recipe | rate | step ms (range) | of DDP | of computing | MB sent | MB on the wire | loss |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        time = f"{r.step_ms:.0f} ({r.low_ms:.0f}-{r.high_ms:.0f})" if r.step_ms else f"failed: {r.error[:80]}"
        cells = [r.recipe, r.rate, time, r.ratio_to_ddp, r.ratio_to_compute, r.sent_mb, r.nic_mb, r.loss]
        lines.append("| " + " | ".join("" if c is None else str(c) for c in cells) + " |")
    return "\n".join(lines) + "\n"
