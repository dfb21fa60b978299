"""gossamer train and gossamer compare."""

import os
import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gossamer.cli import progress
from gossamer.core.errors import GossamerError
from gossamer.lab import parse_links
from gossamer.record import Record, Run
from gossamer.trial import Plan, launch
from gossamer.trial.contender import check
from gossamer.workloads import find, get

Hosts = Annotated[int, typer.Option(help="How many ranks; with --rate, one on each host of a lab.")]
Rate = Annotated[str | None, typer.Option(help="Shape the network: '200mbit', or one rate per host.")]
Workload = Annotated[str, typer.Option(help="What to train; see the documentation for the list.")]
Shards = Annotated[str, typer.Option(help="'iid', or what the workload groups by.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the record and the report.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Say only what went wrong.")]
Json = Annotated[bool, typer.Option("--json", help="Events as JSON lines on standard output.")]
Deadline = Annotated[float, typer.Option(help="Seconds after which a missing rank is an error.")]


def train(
    recipe: Annotated[str, typer.Argument(help="A preset, an expression, or a TOML file.")],
    workload: Workload = "lm",
    hosts: Hosts = 4,
    rate: Rate = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 200,
    seed: int = 0,
    shards: Shards = "iid",
    out: Out = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 50,
    resume: Annotated[bool, typer.Option(help="Go on from the checkpoint in --out.")] = False,
    deadline: Deadline = 120.0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train one recipe on real processes. Started by torchrun, it joins the ranks there are."""
    if resume and out is None:
        raise GossamerError("--resume needs --out: the folder of the run to go on with")
    check(_absolute(recipe))
    folder = _folder(out, "train")
    chunk = min(10, steps)
    plan = Plan({_short(recipe): _absolute(recipe)}, workload, {"shards": shards}, steps, chunk, seed=seed)
    plan.deadline, plan.checkpoint = deadline, str(folder / "checkpoint")
    plan.checkpoint_every, plan.resume = max(chunk, checkpoint_every // chunk * chunk), resume
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _join_launcher(plan, folder)
    _run(plan, hosts, rate, folder, quiet, as_json)


def compare(
    recipes: Annotated[
        list[str], typer.Argument(help="Presets, expressions, TOML files, 'ddp', 'ddp-fp16', 'compute'.")
    ],
    workload: Workload = "lm",
    hosts: Hosts = 4,
    rate: Rate = None,
    steps: Annotated[int, typer.Option(help="Steps of the first recipe, the baseline.")] = 100,
    chunk: Annotated[int, typer.Option(help="Steps between turns and evaluations.")] = 5,
    patience: Annotated[float, typer.Option(help="Others may take so many times the baseline's steps.")] = 2.0,
    seed: int = 0,
    shards: Shards = "iid",
    out: Out = None,
    deadline: Deadline = 120.0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train several recipes in turns on the same data, seed and network; the first is the baseline.

    The others train on until they reach the quality the baseline ended with. Prints a table and writes a report.
    """
    names = dict[str, str]()
    for text in recipes:
        check(_absolute(text))
        names[_unused(_short(text), names)] = _absolute(text)
    plan = Plan(names, workload, {"shards": shards}, steps, min(chunk, steps), next(iter(names)), patience, seed)
    plan.deadline = deadline
    _run(plan, hosts, rate, _folder(out, "compare"), quiet, as_json)


def _run(plan: Plan, hosts: int, rate: str | None, folder: Path, quiet: bool, as_json: bool) -> None:
    if rate is not None:
        parse_links(rate, hosts)  # nonsense is better refused before anything starts
    kind = find(plan.workload)
    get(plan.workload, seed=plan.seed, **plan.options).prepare()  # hosts in a lab reach no registry
    command = shlex.join(["gossamer", *sys.argv[1:]])
    if as_json or quiet or not sys.stderr.isatty():
        show = progress.lines_of_json if as_json else progress.quiet if quiet else progress.plain
        record, code = launch(plan, hosts, rate, command, show)
    else:
        with progress.LiveTable(plan, kind.metric) as table:
            record, code = launch(plan, hosts, rate, command, table.show)
    _keep(record, folder)
    if not as_json and not quiet:
        summary(record)
        print(f"\nreport: {folder / 'report.html'}")
    raise typer.Exit(code)


def _keep(record: Record, folder: Path) -> None:
    from gossamer.report import write_html

    try:
        record.write(folder / "record.json")
        write_html(record, folder / "report.html")
    except OSError as error:
        raise GossamerError(
            f"the report could not be written to {folder}: {error.strerror}; what was there stands"
        ) from None


def summary(record: Record) -> None:
    """The outcome in a table: time to the baseline's quality first."""
    target = record.target()
    base = record.run(record.baseline)
    base_time = base.time_to(target, record.lower_is_better) if base and target is not None else None
    table = Table(box=None, pad_edge=False)
    for head in (
        "recipe",
        "s to quality",
        "of " + record.baseline,
        "ms/step",
        "MB sent/step",
        "NIC/ledger",
        record.metric,
    ):
        table.add_column(head, justify="left" if head == "recipe" else "right")
    for run in record.runs:
        table.add_row(*_cells(run, record, target, base_time))
    console = Console()
    where = (
        f"{record.hosts} ranks at {record.rate}" if record.rate != "unshaped" else f"{record.hosts} ranks, not shaped"
    )
    console.print(f"\n[bold]{record.workload}[/], {where}, seed {record.seed}")
    if target is not None:
        console.print(f"[dim]quality: the {record.metric} that {record.baseline} ended with, {target:.4f}[/]")
    console.print(table)
    if record.note:
        console.print(f"[dim]{record.note}[/]")


def _cells(run: Run, record: Record, target: float | None, base_time: float | None) -> list[str]:
    if run.status != "ok" and not run.steps:
        return [run.name, "failed", *[""] * 5]
    reached = run.time_to(target, record.lower_is_better) if target is not None else None
    steps = max(len(run.steps), 1)
    spent = run.evaluations[-1].seconds if run.evaluations else run.steps[-1].seconds if run.steps else 0.0
    ratio = f"{reached / base_time:.2f}" if reached and base_time else ""
    checked = f"{run.nic_bytes / run.wire_bytes:.3f}" if run.nic_bytes and run.wire_bytes else ""
    best = f"{run.evaluations[-1].quality:.4f}" if run.evaluations else ""
    time = f"{reached:.1f}" if reached is not None else "not reached"
    megabytes = (run.wire_bytes or (run.steps[-1].sent if run.steps else 0)) / steps / 1e6
    return [run.name, time, ratio, f"{1000 * spent / steps:.0f}", f"{megabytes:.2f}", checked, best]


def _join_launcher(plan: Plan, folder: Path) -> None:
    """A launcher has started us as one of several ranks: take part, and leave the record to it."""
    from gossamer.trial import rank

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"plan-{os.environ['RANK']}.json"
    plan.write(path)
    raise typer.Exit(rank.main(str(path)))


def _folder(out: Path | None, kind: str) -> Path:
    folder = out or Path("runs") / f"{kind}-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GossamerError(f"the folder {folder} cannot be made: {error.strerror}") from None
    return folder


def _absolute(text: str) -> str:
    """Ranks may run elsewhere: a recipe file is named by its full path."""
    return str(Path(text).resolve()) if text.strip().endswith(".toml") else text


def _short(text: str) -> str:
    return Path(text).stem if text.strip().endswith(".toml") else text


def _unused(name: str, taken: dict[str, Any]) -> str:
    if name not in taken:
        return name
    return next(f"{name} #{i}" for i in range(2, 1000) if f"{name} #{i}" not in taken)
