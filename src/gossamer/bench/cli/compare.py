"""gossamer train and gossamer compare."""

import os
import shlex
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from gossamer.bench.cli import progress, script
from gossamer.bench.cli.console import console, is_lively
from gossamer.bench.cli.emulation import Compute, Timing, check_compute, compare_steps
from gossamer.bench.cli.errors import InputError
from gossamer.bench.cli.imports import Imports, bring, brought
from gossamer.bench.cli.output import RECORD, Force, run_folder
from gossamer.bench.cli.summary import summary
from gossamer.bench.compare import ComparePlan, join, launch
from gossamer.bench.compare.checkpoints import saved_steps
from gossamer.bench.compare.events import FilesWritten, Note, OnEvent, RankEvent
from gossamer.bench.compare.learning_rates import rates_of
from gossamer.bench.compare.rank_run import check
from gossamer.bench.compare.script_launch import ScriptPlan
from gossamer.bench.compare.stragglers import Straggler
from gossamer.bench.lab import parse_links
from gossamer.bench.lab.network import MOST_HOSTS
from gossamer.bench.record import Record
from gossamer.bench.workloads import get

Hosts = Annotated[
    int, typer.Option(min=1, max=MOST_HOSTS, help="How many hosts; with --rate, those of a lab. One rank on each.")
]
PerHost = Annotated[int, typer.Option(min=1, help="How many ranks on each host; they share its link.")]
Rate = Annotated[
    str | None,
    typer.Option(
        help="Run in a lab: '200mbit', one rate per host '1gbit,100mbit', one slow host '200mbit,3:20mbit', or 'unshaped'."
    ),
]
Workload = Annotated[str, typer.Option(help="What to train; 'gossamer workloads' lists them.")]
Shards = Annotated[str, typer.Option(help="'iid', or what the workload groups by.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the record, the report and checkpoints.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only what went wrong.")]
Json = Annotated[bool, typer.Option("--json", help="Events as JSON lines on standard output.")]
Deadline = Annotated[float, typer.Option(min=1.0, help="Seconds after which a missing rank is an error.")]
Slow = Annotated[
    list[str] | None,
    typer.Option(
        help="Slow a rank down: 'RANK:MS' sleeps this long in every step, 'RANK:MS:CHANCE' in some; 'all' for every rank."
    ),
]
Lr = Annotated[
    list[str] | None,
    typer.Option(
        help="A factor on the workload's learning rate, for all or as 'RECIPE=FACTOR' for one. May be repeated."
    ),
]
Steps = Annotated[int, typer.Option(min=1, help="Optimizer steps.")]


def train(
    recipe: Annotated[str, typer.Argument(help="A preset, an expression, or a TOML file.")],
    workload: Workload = "lm",
    hosts: Hosts = 4,
    per_host: PerHost = 1,
    rate: Rate = None,
    steps: Steps = 200,
    seed: int = 0,
    shards: Shards = "iid",
    out: Out = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 50,
    resume: Annotated[
        bool, typer.Option(help="Continue from the checkpoint in --out: same recipe, ranks and network.")
    ] = False,
    deadline: Deadline = 120.0,
    imports: Imports = None,
    slow: Slow = None,
    compute: Compute = None,
    lr: Lr = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train one recipe on real processes. Started by torchrun, it joins the ranks of the launcher."""
    if resume and out is not None:
        bring(_imported_before(out))
    check(_absolute(recipe))
    chunk = min(10, steps, checkpoint_every)
    plan = ComparePlan({_short(recipe): _absolute(recipe)}, workload, {"shards": shards}, steps, chunk, seed=seed)
    plan.deadline, plan.checkpoint_every, plan.resume = deadline, checkpoint_every, resume
    plan.per_host, plan.imports, plan.slow, plan.compute = per_host, brought(), slow or [], check_compute(compute)
    plan.lr = rates_of(lr or [], plan.contenders)
    if resume:
        _check_resumable(out)
    _check_place(plan, hosts, rate)
    if _is_a_rank():
        _join(plan, rate, out, force, quiet, as_json)
    folder = _folder(out, "train", force)
    plan.checkpoint = str((folder / "checkpoint").resolve())
    _run(plan, hosts, rate, folder, quiet, as_json)


def compare(
    ctx: typer.Context,
    recipes: Annotated[
        list[str],
        typer.Argument(
            help="Presets, expressions, TOML files, or baselines without gossamer: 'ddp', 'ddp-fp16', 'compute'."
        ),
    ],
    own: Annotated[
        Path | None,
        typer.Option("--script", help="Train by this script, once per recipe; its own arguments come after --."),
    ] = None,
    cwd: Annotated[
        Path | None,
        typer.Option(help="Folder to run the script in, made if it is missing; 'out-{recipe}' is one for each recipe."),
    ] = None,
    workload: Workload = "lm",
    hosts: Hosts = 4,
    per_host: PerHost = 1,
    rate: Rate = None,
    steps: Annotated[
        int, typer.Option(min=1, help="Steps of the first recipe, the baseline; a script ends after so many.")
    ] = 100,
    chunk: Annotated[int, typer.Option(min=1, help="Steps of a turn, at least; an evaluation follows each.")] = 5,
    patience: Annotated[
        float, typer.Option(min=1.0, help="The others may take this many times the baseline's steps.")
    ] = 2.0,
    seed: int = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Repeat with this many seeds, for bounds and ties.")] = 1,
    shards: Shards = "iid",
    out: Out = None,
    deadline: Deadline = 120.0,
    imports: Imports = None,
    slow: Slow = None,
    timing: Timing = False,
    compute: Compute = None,
    lr: Lr = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train several recipes in turns on the same data, seed and network; the first is the baseline.

    The others train on until they reach the quality the baseline ended with. Prints a table and writes a report.
    A --script runs as torchrun would run it, with one line of ours: gossamer.attach(model, optimizer), without a recipe.
    In its arguments {recipe} becomes the recipe's name: -- --out_dir=out-{recipe}.
    """
    if own is not None:
        limit = steps if script.is_said(ctx, "steps") else 0
        names, mine = _named(recipes), brought()
        options = script.ScriptOptions(
            own, names, hosts, per_host, rate, chunk, deadline, mine, limit, cwd, quiet, as_json
        )
        _run_script(script.plan_of(ctx, options), options, out, force)
    script.refuse_arguments(ctx, cwd)
    if _is_a_rank():
        raise InputError("compare starts its own ranks, and here a launcher has started some: run it once, without one")
    names = _named(recipes)
    plan = ComparePlan(names, workload, {"shards": shards}, steps, min(chunk, steps), next(iter(names)), patience, seed)
    plan.deadline, plan.per_host = deadline, per_host
    plan.imports, plan.slow, plan.lr = brought(), slow or [], rates_of(lr or [], names)
    compare_steps(plan, timing, compute)
    _check_place(plan, hosts, rate)
    _run(plan, hosts, rate, _folder(out, "compare", force), quiet, as_json, seeds)


def _named(recipes: list[str]) -> dict[str, str]:
    names = dict[str, str]()
    for text in recipes:
        check(_absolute(text))
        names[_unused(_short(text), names)] = _absolute(text)
    return names


def _is_a_rank() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _check_place(plan: ComparePlan, hosts: int, rate: str | None) -> None:
    """Check workload, rate and --slow before a folder is made."""
    get(plan.workload, seed=plan.seed, **plan.options)
    if rate is not None:
        parse_links(rate, hosts)
    for text in plan.slow:
        Straggler.of(text, hosts * plan.per_host)


def _imported_before(folder: Path) -> list[str]:
    """Modules that the resumed run had imported."""
    earlier = _earlier(folder)
    return earlier.imports if earlier else []


def _check_resumable(out: Path | None) -> None:
    """Raise InputError if there is no checkpoint to resume from; ranks check their own later."""
    if out is None:
        raise InputError("--resume needs --out: the folder of the run to resume")
    rank = int(os.environ.get("RANK", "0"))
    if not saved_steps(out / "checkpoint", rank):
        raise InputError(f"nothing to resume from: no checkpoint in {out / 'checkpoint'}; run without --resume first")


def _run(
    plan: ComparePlan, hosts: int, rate: str | None, folder: Path, quiet: bool, as_json: bool, seeds: int = 1
) -> None:
    # Fetch data here: hosts of a lab reach no network, and all ranks would fetch at once.
    get(plan.workload, seed=plan.seed, **plan.options).prepare()
    earlier = _earlier(folder) if plan.resume else None
    record, code = None, 0
    for number, seed in enumerate(range(plan.seed, plan.seed + seeds), 1):
        one = replace(plan, seed=seed)
        with _shown(one, quiet, as_json) as show:
            if seeds > 1:
                show(RankEvent(Note(f"seed {seed}, {number} of {seeds}")))
            made, ended = launch(one, hosts, rate, _command(), show, folder / RECORD, record)
        record, code = record.with_again(made) if record else made, max(code, ended)
        if ended > 1:  # interrupted
            break
    assert record is not None
    _conclude(record, code, folder, quiet, as_json, earlier)


def _run_script(plan: ScriptPlan, options: script.ScriptOptions, out: Path | None, force: bool) -> NoReturn:
    made = script.missing_folders(folder := _named_folder(out, "script"))
    follow = script.join if _is_a_rank() else script.launch
    if not _is_a_rank() or not int(os.environ["RANK"]):
        run_folder(folder, force)
    with _shown(plan, options.quiet, options.as_json) as show:
        record, code = follow(plan, options, folder, made, _command(), show)
    _conclude(record, code, folder, options.quiet, options.as_json)


@contextmanager
def _shown(plan: ComparePlan | ScriptPlan, quiet: bool, as_json: bool) -> Generator[OnEvent]:
    if as_json or quiet or not is_lively(stderr=True):
        yield _lines(plan, quiet, as_json)
    else:
        with progress.LiveTable(plan) as table:
            yield table.show


def _join(plan: ComparePlan, rate: str | None, out: Path | None, force: bool, quiet: bool, as_json: bool) -> None:
    """A launcher has started us as one of several ranks: take part. Rank 0 shows and keeps what comes of it."""
    if rate is not None:
        raise InputError("--rate shapes a network that gossamer starts ranks in; here a launcher has started them")
    get(plan.workload, seed=plan.seed, **plan.options).prepare()
    if out is not None:  # without it the ranks, perhaps on several machines, have no name in common for their files
        plan.checkpoint = str((_folder(out, "train", force) / "checkpoint").resolve())
    if int(os.environ["RANK"]):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # so that rank 0 does not wait for us when the launcher ends us
        raise typer.Exit(join(plan, _command(), _ignore)[1])
    folder = _folder(out, "train", force)
    earlier = _earlier(folder) if plan.resume else None
    record, code = join(plan, _command(), _lines(plan, quiet, as_json), folder / RECORD)
    _conclude(record, code, folder, quiet, as_json, earlier)


def _lines(plan: ComparePlan | ScriptPlan, quiet: bool, as_json: bool) -> OnEvent:
    return progress.events_as_json if as_json else progress.quiet if quiet else progress.PlainLines(plan).show


def _ignore(event: RankEvent) -> None:
    if isinstance(event.what, Note):
        progress.troubles(event)


def _command() -> str:
    return shlex.join(["gossamer", *sys.argv[1:]])


def _earlier(folder: Path) -> Record | None:
    try:
        return Record.read(folder / RECORD)
    except (OSError, ValueError):
        return None  # the checkpoint has its history, too


def _conclude(
    record: Record, code: int, folder: Path, quiet: bool, as_json: bool, earlier: Record | None = None
) -> NoReturn:
    trouble = _keep(record, folder, earlier)
    if not quiet and not as_json:
        summary(record)  # printed even if the files could not be written
    if trouble:
        print(f"gossamer: {trouble}", file=sys.stderr)
    elif as_json:
        progress.events_as_json(RankEvent(FilesWritten(code, str(folder / RECORD), str(folder / "report.html"))))
    elif not quiet:
        console().print(f"\nreport: {folder / 'report.html'}", markup=False, soft_wrap=True)
    raise typer.Exit(code or int(bool(trouble)))


def _keep(record: Record, folder: Path, earlier: Record | None) -> str:
    """Write record and report of a run; return why that failed, or an empty string."""
    from gossamer.bench.report import write_html

    if earlier is not None and not record.has_begun:
        return f"the run could not be resumed; record and report in {folder} are still those of the earlier run"
    try:
        record.write(folder / RECORD)
        write_html(record, folder / "report.html")
    except OSError as error:
        return (
            f"the report could not be written to {folder}: {error.strerror or error}; the earlier files are unchanged"
        )
    return ""


def _folder(out: Path | None, kind: str, force: bool) -> Path:
    folder = _named_folder(out, kind)
    run_folder(folder, force)
    return folder


def _named_folder(out: Path | None, kind: str) -> Path:
    return out or Path("runs") / f"{kind}-{datetime.now():%Y%m%d-%H%M%S}"


def _absolute(text: str) -> str:
    """Full path of a recipe file, since ranks may run in another folder; links are not resolved."""
    return str(Path(text.strip()).absolute()) if text.strip().endswith(".toml") else text


def _short(text: str) -> str:
    return Path(text.strip()).stem if text.strip().endswith(".toml") else text


def _unused(name: str, taken: dict[str, Any]) -> str:
    if name not in taken:
        return name
    return next(f"{name} #{i}" for i in range(2, 1000) if f"{name} #{i}" not in taken)
