"""gossamer bench: how fast the kernels are, how exact recipes are, and what a step costs."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.markup import escape
from rich.table import Table

from gossamer.bench.cli import progress
from gossamer.bench.cli.compare import Compute, Slow, Workload, check_compute
from gossamer.bench.cli.console import console
from gossamer.bench.cli.errors import InputError
from gossamer.bench.cli.imports import Imports, brought
from gossamer.bench.cli.output import Force, hold, made_folder, writing
from gossamer.bench.compare import ComparePlan
from gossamer.bench.compare.baselines import usable
from gossamer.bench.compare.rank_run import check
from gossamer.bench.compare.steps import StepRow, measure_steps
from gossamer.bench.compare.stragglers import Straggler
from gossamer.bench.kernels import measure as kernel_speeds
from gossamer.bench.lab import available, parse_links
from gossamer.bench.lab.network import MOST_HOSTS
from gossamer.bench.noise import gradients
from gossamer.bench.noise import measure as noise_rows
from gossamer.bench.record import finite
from gossamer.bench.report import svg
from gossamer.bench.report.charts import Bar, BarChart
from gossamer.bench.report.formatting import ranks_on
from gossamer.bench.workloads import get
from gossamer.core import files

RECIPES = [
    *("allreduce", "bf16", "fp16", "qsgd", "terngrad", "topk", "powersgd(rank=1)", "powersgd(rank=4)", "diana"),
    *("local_sgd(8)", "slowmo(8)", "overlap_local_sgd(8)", "sgp", "osgp", "backup"),
]

HIDDEN = 1.05  # of computing alone: the noise of a step
NOISE = [
    *("scatter(eden(1))", "drive", *(f"scatter(eden({bits}))" for bits in range(2, 6))),
    *(f"scatter(qsgd({bits}))" for bits in range(2, 6)),
    *(f"scatter(qsgd({bits}, bucket=64))" for bits in range(2, 5)),
    *("scatter(qsgd(code='rice'))", "terngrad", "natural", "fp8", "int8", "scatter(bernoulli())"),
    *("scatter(topk(0.03)) + error_feedback()", "powersgd(rank=4)"),
]

ANOTHER = "give another folder, or --force"
AUTHOR = "<!-- steps, measured by gossamer -->\n\n"
ROWS = files.FileKind("table of steps", (b',\n  "ratio_to_ddp": ', AUTHOR.strip().encode()))

app = typer.Typer(help="Measure kernels, the noise of recipes, or whole steps.", no_args_is_help=True)


@app.command()
def kernels(
    elements: Annotated[int, typer.Option(min=1024, max=2**30, help="Length of the float32 vector.")] = 25_600_000,
    rounds: Annotated[int, typer.Option(min=1, help="Take the best of this many medians.")] = 3,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="Where: one thread of a CPU, or the first GPU.")
    ] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure every kernel against a copy of the same array: GB/s of float32 input, and the ratio to the copy.

    On a CPU the copy is libc's memcpy, on a GPU one on the device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no GPU here; gossamer bench kernels without it measures the CPU's")
    rows = [r._asdict() for r in kernel_speeds(elements, rounds, device=device)]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table("kernel", "backend", "GB/s", "of a copy", box=None, pad_edge=False)
    for r in rows:
        table.add_row(r["kernel"], r["backend"], f"{r['gb_per_s']:.2f}", f"{r['ratio_to_memcpy']:.2f}")
    console().print(table)


@app.command()
def noise(
    recipes: Annotated[list[str] | None, typer.Argument(help="Exchanges of 1 to 8 bits by default.")] = None,
    workload: Workload = "lm",
    ranks: Annotated[int, typer.Option(min=2, max=4096, help="How many virtual ranks.")] = 8,
    at: Annotated[int, typer.Option(min=0, help="Measure after so many steps of synchronous training.")] = 5,
    seed: int = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the squared error of messages and means on real gradients, beside the bits that are sent.

    Nothing is started: virtual ranks train in this process. Memories, rules and schedules of a recipe do not act: one gradient is sent
    once. Bits are those that a rank sends an element, where a dense average in two phases sends 32.
    """
    for text in recipes or []:
        check(text)
    rows = noise_rows(recipes or NOISE, gradients(get(workload, seed=seed), ranks, at, seed), seed)
    if as_json:
        print(json.dumps(finite([row._asdict() for row in rows]), indent=1, allow_nan=False))
        return
    table = Table("recipe", "bits", "error of a message", "of the mean", box=None, pad_edge=False)
    for row in rows:
        message = "" if row.message is None else f"{row.message:.3g}"
        table.add_row(escape(row.recipe), f"{row.bits:.2f}", message, f"{row.mean:.3g}")
    console().print(table)


@app.command()
def steps(
    recipes: Annotated[
        list[str] | None,
        typer.Argument(help="Most presets by default; baselines without gossamer are always included."),
    ] = None,
    rates: Annotated[
        str, typer.Option(help="Rates, separated by spaces; '200mbit,3:20mbit' is one with a slow host.")
    ] = "100mbit 200mbit 1gbit unshaped",
    hosts: Annotated[int, typer.Option(min=2, max=MOST_HOSTS, help="How many hosts.")] = 4,
    per_host: Annotated[int, typer.Option(min=1, help="How many ranks on each; they share its link.")] = 1,
    turns: Annotated[int, typer.Option(min=1, help="Measured turns per recipe.")] = 6,
    chunk: Annotated[int, typer.Option(min=1, help="Steps per turn.")] = 4,
    workload: Annotated[str, typer.Option(help="What to train.")] = "lm",
    out: Annotated[Path | None, typer.Option(help="Folder for steps.json, steps.md and a plot for each rate.")] = None,
    compute: Compute = None,
    slow: Slow = None,
    imports: Imports = None,
    force: Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure step times of the 5.8 M-parameter language model: recipes, DDP and its hooks, and computing alone.

    All train in turns in one lab; times are medians over steps (over whole rounds, for schedules that have such), with their
    range; bytes are per host and step.
    """
    for text in recipes or []:
        check(text)
    emulate = check_compute(compute)
    wanted = _rates(rates, hosts)
    for text in slow or []:
        Straggler.of(text, hosts * per_host)
    if out is not None:
        _prepare(out, wanted, force)
    get(workload).prepare()
    names = {n: n for n in [*usable(), *(recipes or RECIPES)]}
    plan = ComparePlan(names, workload, chunk=chunk, per_host=per_host, imports=brought(), slow=slow or [])
    plan.compute = emulate
    rows: list[StepRow] = []
    try:
        for rate in wanted:
            print(f"{len(names)} runs, {ranks_on(hosts, per_host)}, {rate}", file=sys.stderr, flush=True)
            rows += measure_steps(plan, turns, rate, hosts, progress.quiet)
            if out is not None:  # results are written after each rate
                _write(rows, out, force)
    finally:  # an interrupt, or a full disk, does not take along what has been measured
        if rows:
            print(_as_json(rows) if as_json else as_markdown(rows))
    raise typer.Exit(int(any(r.error for r in rows)))


def _rates(text: str, hosts: int) -> list[str]:
    """Rates that can be measured here: only 'unshaped' without a lab."""
    wanted = text.split()
    if not wanted:
        raise InputError("--rates names no rate; write some, as in --rates '200mbit 1gbit', or unshaped")
    for rate in wanted:
        parse_links(rate, hosts)
    reason = available()
    if reason is None:
        return wanted
    print(f"no lab here, so rates cannot be compared, only this machine's own: {reason}", file=sys.stderr, flush=True)
    return ["unshaped"]


def _prepare(folder: Path, rates: list[str], force: bool) -> None:
    """Check the output files before measuring, which takes hours."""
    with writing(made_folder(folder), ANOTHER):
        for name in ("steps.json", "steps.md", *map(_plot, rates)):
            files.writable(folder / name, _kind(name), force)
    hold(folder)


def _write(rows: list[StepRow], folder: Path, force: bool) -> None:
    texts = {"steps.json": _as_json(rows), "steps.md": AUTHOR + as_markdown(rows)}
    with writing(folder, ANOTHER):
        for name, text in (texts | plots(rows)).items():
            files.write(folder / name, text, _kind(name), force)


def _as_json(rows: list[StepRow]) -> str:
    return json.dumps(finite([asdict(r) for r in rows]), indent=1, allow_nan=False)  # a loss that ran away is null


def _kind(name: str) -> files.FileKind:
    return svg.SVG if name.endswith(".svg") else ROWS


def _plot(rate: str) -> str:
    return f"steps-{rate.replace('/', '-').replace(',', '_').replace(':', '-')}.svg"


def plots(rows: list[StepRow]) -> dict[str, str]:
    """One SVG for each rate: how long a step takes, the fastest first."""
    made = dict[str, str]()
    for rate in dict.fromkeys(r.rate for r in rows):
        shown = sorted((r for r in rows if r.rate == rate and r.step_ms), key=lambda r: r.step_ms)
        bars = [Bar(i, [r.step_ms / 1000], r.step_ms / 1000) for i, r in enumerate(shown)]
        if bars:
            title = f"Median step, {ranks_on(shown[0].hosts, shown[0].per_host)}, {rate}"
            chart = BarChart("steps", title, "", [title], bars)
            made[_plot(rate)] = svg.bars(chart, [r.recipe for r in shown])
    return made


def as_markdown(rows: list[StepRow]) -> str:
    """Format the rows as one Markdown table."""
    several, emulated = any(r.per_host > 1 for r in rows), any(r.compute for r in rows)
    slowed = any(r.slow for r in rows)
    heads = ["recipe", "rate", "step ms (range)", "of DDP", "of computing", "MB sent", "MB on the wire"]
    heads += ["exposed ms", "hides", "processor ms"] if emulated else ["loss"]
    heads += ["MB inside"] if several else []
    heads += ["slow ranks"] if slowed else []
    lines = ["| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |"]
    for r in rows:
        time = [f"{r.step_ms:.0f} ({r.low_ms:.0f}-{r.high_ms:.0f})"] if r.step_ms else []
        time += [f"failed: {_cell(r.error)}"] if r.error or not r.step_ms else []  # also after some steps
        cells = [r.recipe, r.rate, ", ".join(time), r.ratio_to_ddp, r.ratio_to_compute, r.sent_mb, r.nic_mb]
        cells += [r.exposed_ms, _hides(r), r.processor_ms] if emulated else [r.loss]
        cells += [r.inside_mb] if several else []
        cells += [r.slow] if slowed else []
        lines.append("| " + " | ".join("" if c is None else str(c) for c in cells) + " |")
    return "\n".join(lines) + "\n"


def _hides(row: StepRow) -> str | None:
    """What a recipe does beside computing is hidden if a step is hardly longer than computing alone."""
    if row.ratio_to_compute is None or row.recipe == "compute":
        return None
    return "yes" if row.ratio_to_compute <= HIDDEN else "no"


def _cell(text: str) -> str:
    """Escape a text for a Markdown table cell."""
    return " ".join(text.split()).replace("|", "\\|")[:80]
