"""gossamer train and gossamer compare."""

import os
import shlex
import signal
import sys
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from gossamer.cli import progress
from gossamer.cli.console import console
from gossamer.cli.errors import FailedError, InputError, as_input
from gossamer.lab import parse_links
from gossamer.record import Record, Run
from gossamer.report.words import size
from gossamer.trial import Plan, join, launch
from gossamer.trial.contender import check
from gossamer.trial.saving import saved_steps
from gossamer.trial.yardsticks import YARDSTICKS
from gossamer.workloads import get

Hosts = Annotated[int, typer.Option(min=1, help="How many ranks; with --rate, one on each host of a lab.")]
Rate = Annotated[
    str | None, typer.Option(help="Run in a lab: '200mbit', one rate per host '1gbit,100mbit', or 'unshaped'.")
]
Workload = Annotated[str, typer.Option(help="What to train; see the documentation for the list.")]
Shards = Annotated[str, typer.Option(help="'iid', or what the workload groups by.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the record, the report and checkpoints.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Say only what went wrong.")]
Json = Annotated[bool, typer.Option("--json", help="Events as JSON lines on standard output.")]
Deadline = Annotated[float, typer.Option(min=1.0, help="Seconds after which a missing rank is an error.")]
Steps = Annotated[int, typer.Option(min=1, help="Optimizer steps.")]


def train(
    recipe: Annotated[str, typer.Argument(help="A preset, an expression, or a TOML file.")],
    workload: Workload = "lm",
    hosts: Hosts = 4,
    rate: Rate = None,
    steps: Steps = 200,
    seed: int = 0,
    shards: Shards = "iid",
    out: Out = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 50,
    resume: Annotated[bool, typer.Option(help="Go on from the checkpoint in --out.")] = False,
    deadline: Deadline = 120.0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train one recipe on real processes. Started by torchrun, it joins the ranks there are."""
    check(_absolute(recipe))
    chunk = min(10, steps, checkpoint_every)
    plan = Plan({_short(recipe): _absolute(recipe)}, workload, {"shards": shards}, steps, chunk, seed=seed)
    plan.deadline, plan.checkpoint_every, plan.resume = deadline, checkpoint_every, resume
    if resume:
        _check_resumable(out)
    _check_workload(plan)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _join(plan, rate, out, quiet, as_json)
    folder = _folder(out, "train")
    plan.checkpoint = str((folder / "checkpoint").resolve())
    _run(plan, hosts, rate, folder, quiet, as_json)


def compare(
    recipes: Annotated[
        list[str], typer.Argument(help="Presets, expressions, TOML files, or yardsticks: 'ddp', 'ddp-fp16', 'compute'.")
    ],
    workload: Workload = "lm",
    hosts: Hosts = 4,
    rate: Rate = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the first recipe, the baseline.")] = 100,
    chunk: Annotated[int, typer.Option(min=1, help="Steps between turns and evaluations.")] = 5,
    patience: Annotated[float, typer.Option(min=1.0, help="Others may take so many times the baseline's steps.")] = 2.0,
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
    _check_workload(plan)
    _run(plan, hosts, rate, _folder(out, "compare"), quiet, as_json)


def _check_workload(plan: Plan) -> None:
    get(plan.workload, seed=plan.seed, **plan.options)


def _check_resumable(out: Path | None) -> None:
    """Every rank looks for its own checkpoint later; this is the early word to a person."""
    if out is None:
        raise InputError("--resume needs --out: the folder of the run to go on with")
    rank = int(os.environ.get("RANK", "0"))
    if not saved_steps(out / "checkpoint", rank):
        raise InputError(f"nothing to resume from: no checkpoint in {out / 'checkpoint'}; run without --resume first")


def _run(plan: Plan, hosts: int, rate: str | None, folder: Path, quiet: bool, as_json: bool) -> None:
    if rate is not None:
        as_input(lambda: parse_links(rate, hosts))  # nonsense is better refused before anything starts
    # Hosts in a lab reach no registry, and ranks would all fetch at once.
    get(plan.workload, seed=plan.seed, **plan.options).prepare()
    earlier = _earlier(folder) if plan.resume else None
    if as_json or quiet or not sys.stderr.isatty():
        show = progress.lines_of_json if as_json else progress.quiet if quiet else progress.plain
        record, code = launch(plan, hosts, rate, _command(), show, earlier)
    else:
        with progress.LiveTable(plan) as table:
            record, code = launch(plan, hosts, rate, _command(), table.show, earlier)
    _conclude(record, code, folder, quiet, as_json)


def _join(plan: Plan, rate: str | None, out: Path | None, quiet: bool, as_json: bool) -> None:
    """A launcher has started us as one of several ranks: take part. Rank 0 shows and keeps what comes of it."""
    if rate is not None:
        raise InputError("--rate shapes a network that gossamer starts ranks in; here a launcher has started them")
    get(plan.workload, seed=plan.seed, **plan.options).prepare()
    if out is not None:  # without it the ranks, perhaps on several machines, have no name in common for their files
        plan.checkpoint = str((_folder(out, "train") / "checkpoint").resolve())
    if int(os.environ["RANK"]):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # so that rank 0 does not wait for us when the launcher ends us
        raise typer.Exit(join(plan, _command(), _ignore)[1])
    folder = _folder(out, "train")
    show = progress.lines_of_json if as_json else progress.quiet if quiet else progress.plain
    earlier = _earlier(folder) if plan.resume else None
    record, code = join(plan, _command(), show, earlier)
    _conclude(record, code, folder, quiet, as_json)


def _ignore(event: dict[str, Any]) -> None:
    if event["event"] in ("broken", "note"):
        progress.plain(event)


def _command() -> str:
    return shlex.join(["gossamer", *sys.argv[1:]])


def _earlier(folder: Path) -> Record | None:
    try:
        return Record.read(folder / "record.json")
    except (OSError, ValueError, KeyError, TypeError):
        return None  # its history is lost; training goes on from the checkpoint all the same


def _conclude(record: Record, code: int, folder: Path, quiet: bool, as_json: bool) -> None:
    _keep(record, folder)
    if as_json:
        where = {"record": str(folder / "record.json"), "report": str(folder / "report.html")}
        progress.lines_of_json({"event": "written", "code": code, **where})
    elif not quiet:
        summary(record)
        console().print(f"\nreport: {folder / 'report.html'}", markup=False, soft_wrap=True)
    raise typer.Exit(code)


def _keep(record: Record, folder: Path) -> None:
    from gossamer.report import write_html

    try:
        record.write(folder / "record.json")
        write_html(record, folder / "report.html")
    except OSError as error:
        raise FailedError(
            f"the report could not be written to {folder}: {error.strerror}; what was there stands"
        ) from None


def summary(record: Record) -> None:
    """The outcome in a table: time to the baseline's quality first."""
    out = console()
    where = "not shaped" if record.rate == "unshaped" else f"at {record.rate}"
    out.print(f"\n[bold]{escape(record.workload)}[/], {record.hosts} ranks, {where}, seed {record.seed}")
    target = record.target()
    if target is not None and len(record.runs) > 1:
        out.print(f"[dim]quality: the {record.metric} that {escape(record.baseline)} ended with, {target:.4f}[/]")
    elif target is not None:
        out.print(f"[dim]quality: {record.metric}[/]")
    out.print(_table(record, target))
    for run in record.runs:
        if run.status != "ok":
            out.print(f"{run.name}: {run.error}", markup=False)
    if record.note:
        out.print(record.note, style="dim", markup=False)


def _table(record: Record, target: float | None) -> Table:
    several = len(record.runs) > 1
    heads = ["recipe", "ms/step", "sent/step", "NIC/ledger", "quality"]
    if several:
        heads[1:1] = ["s to quality", f"of {record.baseline}"]
    table = Table(box=None, pad_edge=False)
    for i, head in enumerate(heads):
        table.add_column(escape(head), justify="right" if i else "left", no_wrap=i != 2, overflow="fold")
    base = record.run(record.baseline)
    base_time = base.time_to(target, record.lower_is_better) if base and target is not None else None
    for run in record.runs:
        cells = _cells(run)
        if several and run.steps:
            cells[1:1] = _time_to_quality(run, record, target, base_time)
        table.add_row(*map(escape, cells))
    return table


def _time_to_quality(run: Run, record: Record, target: float | None, base_time: float | None) -> list[str]:
    if run.recipe == "compute":
        return ["", ""]  # it trains alone, and is there for its step time
    reached = run.time_to(target, record.lower_is_better) if target is not None else None
    if reached is None:
        return ["failed" if run.status != "ok" else "not reached", ""]
    return [f"{reached:.1f}", f"{reached / base_time:.2f}" if base_time else ""]


def _cells(run: Run) -> list[str]:
    if not run.steps:
        return [run.name, "failed" if run.status != "ok" else ""]
    clock = [s.seconds for s in run.steps]
    # The first step also pays for warming up.
    pace = median(b - a for a, b in pairwise(clock)) if len(clock) > 1 else clock[0]
    sent = (run.wire_bytes or run.steps[-1].sent) / len(run.steps)
    checked = f"{run.nic_bytes / run.wire_bytes:.3f}" if run.nic_bytes and run.wire_bytes else ""
    best = f"{run.evaluations[-1].quality:.4f}" if run.evaluations else ""
    return [run.name, f"{1000 * pace:.0f}", size(sent) if sent or run.recipe not in YARDSTICKS else "", checked, best]


def _folder(out: Path | None, kind: str) -> Path:
    folder = out or Path("runs") / f"{kind}-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FailedError(f"the folder {folder} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):  # better said now than after the run
        raise FailedError(f"the folder {folder} cannot be written to; give another one with --out")
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
