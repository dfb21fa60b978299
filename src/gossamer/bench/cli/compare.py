"""gossamer train and gossamer compare."""

import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from gossamer.bench.cli import progress, script
from gossamer.bench.cli.errors import InputError
from gossamer.bench.cli.imports import Imports, bring, brought
from gossamer.bench.cli.output import Force
from gossamer.bench.cli.run_output import RunOutput, command, is_a_rank
from gossamer.bench.compare import ComparePlan, join, launch
from gossamer.bench.compare.checkpoints import saved_steps
from gossamer.bench.compare.events import Note, RankEvent
from gossamer.bench.compare.learning_rates import rates_of
from gossamer.bench.compare.rank_run import check
from gossamer.bench.compare.stragglers import Straggler
from gossamer.bench.lab import parse_links
from gossamer.bench.lab.network import MOST_HOSTS
from gossamer.bench.record import Record
from gossamer.bench.workloads import get
from gossamer.bench.workloads.computing import ComputeTime

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


def _finite(param: typer.CallbackParam, value: float) -> float:
    if not math.isfinite(value):
        raise InputError(f"--{param.name} must be a finite number, not {value}")
    return value


Deadline = Annotated[
    float, typer.Option(min=1.0, callback=_finite, help="Seconds after which a missing rank is an error.")
]
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
Compute = Annotated[
    str | None,
    typer.Option(
        help="Emulate an accelerator: forward and backward wait for '150ms', '150ms lognormal 0.2' or "
        "'150ms exponential 30ms' in place of computing. Losses mean nothing then."
    ),
]


def train(
    recipe: Annotated[str, typer.Argument(help="A preset, an expression, or a TOML file.")],
    workload: Workload = "lm",
    hosts: Hosts = 4,
    per_host: PerHost = 1,
    rate: Rate = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 200,
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
    output = RunOutput("train", out, force, quiet, as_json)
    earlier = output.earlier() if resume and out is not None else None
    if earlier is not None:
        bring(earlier.imports)
    check(_absolute(recipe))
    chunk = min(10, steps, checkpoint_every)
    plan = ComparePlan({_short(recipe): _absolute(recipe)}, workload, {"shards": shards}, steps, chunk, seed=seed)
    plan.deadline, plan.checkpoint_every, plan.resume = deadline, checkpoint_every, resume
    plan.per_host, plan.imports, plan.slow, plan.compute = per_host, brought(), slow or [], check_compute(compute)
    plan.lr = rates_of(lr or [], plan.contenders)
    if resume:
        _check_resumable(out)
    _check_place(plan, hosts, rate)
    if is_a_rank():
        _join(plan, rate, output)
    output.prepare()
    plan.checkpoint = output.checkpoint
    _run(plan, hosts, rate, output)


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
        float, typer.Option(min=1.0, callback=_finite, help="The others may take this many times the baseline's steps.")
    ] = 2.0,
    seed: int = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Repeat with this many seeds, for bounds and ties.")] = 1,
    shards: Shards = "iid",
    out: Out = None,
    deadline: Deadline = 120.0,
    imports: Imports = None,
    slow: Slow = None,
    timing: Annotated[
        bool, typer.Option("--timing", help="Compare steps, not quality: every recipe trains for --steps steps.")
    ] = False,
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
        own_plan = script.plan_of(ctx, own, _named(recipes), cwd)
        own_plan.deadline, own_plan.chunk, own_plan.per_host, own_plan.imports = deadline, chunk, per_host, brought()
        own_plan.steps = steps if script.is_said(ctx, "steps") else 0
        script.run(own_plan, hosts, rate, RunOutput("script", out, force, quiet, as_json))
    script.refuse_arguments(ctx, cwd)
    if is_a_rank():
        raise InputError("compare starts its own ranks, and here a launcher has started some: run it once, without one")
    names = _named(recipes)
    plan = ComparePlan(names, workload, {"shards": shards}, steps, min(chunk, steps), next(iter(names)), patience, seed)
    plan.deadline, plan.per_host = deadline, per_host
    plan.imports, plan.slow, plan.lr = brought(), slow or [], rates_of(lr or [], names)
    plan.compute, plan.timing = check_compute(compute), timing
    if timing:
        plan.baseline = ""  # a quality to reach; without it all have as many steps
    elif compute is not None:
        raise InputError("--compute emulates computing, so no quality can be compared: add --timing to compare steps")
    _check_place(plan, hosts, rate)
    output = RunOutput("compare", out, force, quiet, as_json)
    output.prepare()
    _run(plan, hosts, rate, output, seeds)


def _named(recipes: list[str]) -> dict[str, str]:
    names = dict[str, str]()
    for text in recipes:
        check(_absolute(text))
        names[_unused(_short(text), names)] = _absolute(text)
    return names


def check_compute(text: str | None) -> str:
    """The text of --compute, which must be one that ranks can read; empty if the option was not given."""
    if text is not None:
        ComputeTime.of(text)
    return text or ""


def _check_place(plan: ComparePlan, hosts: int, rate: str | None) -> None:
    """Check workload, hosts, rate and --slow before a folder is made."""
    script.refuse_uneven_hosts(plan.per_host)
    get(plan.workload, seed=plan.seed, **plan.options)
    if rate is not None:
        parse_links(rate, hosts)
    for text in plan.slow:
        Straggler.of(text, int(os.environ["WORLD_SIZE"]) if is_a_rank() else hosts * plan.per_host)


def _check_resumable(out: Path | None) -> None:
    """Raise InputError if there is no checkpoint to resume from; ranks check their own later."""
    if out is None:
        raise InputError("--resume needs --out: the folder of the run to resume")
    rank = int(os.environ["RANK"]) if is_a_rank() else 0
    if not saved_steps(out / "checkpoint", rank):
        raise InputError(f"nothing to resume from: no checkpoint in {out / 'checkpoint'}; run without --resume first")


def _run(plan: ComparePlan, hosts: int, rate: str | None, output: RunOutput, seeds: int = 1) -> NoReturn:
    # Fetch data here: hosts of a lab reach no network, and all ranks would fetch at once.
    get(plan.workload, seed=plan.seed, **plan.options).prepare()
    earlier = output.earlier() if plan.resume else None
    told = _commands(earlier)
    record, code = None, 0
    for number, seed in enumerate(range(plan.seed, plan.seed + seeds), 1):
        one = replace(plan, seed=seed)
        try:
            with output.shown(one) as show:
                if seeds > 1:
                    show(RankEvent(Note(f"seed {seed}, {number} of {seeds}")))
                made, ended = launch(one, hosts, rate, told, show, output.record, record)
        except KeyboardInterrupt as stop:  # between two seeds: those that are over keep their record and their report
            if record is None:
                raise
            code = 128 + int(stop.args[0] if stop.args else signal.SIGINT)
            break
        record, code = record.with_again(made) if record else made, max(code, ended)
        if ended > 1:  # interrupted
            break
    assert record is not None
    output.conclude(record, code, earlier)


def _join(plan: ComparePlan, rate: str | None, output: RunOutput) -> NoReturn:
    """A launcher has started us as one of several ranks: take part. Rank 0 shows and keeps what comes of it."""
    if rate is not None:
        raise InputError(script.STARTED)
    get(plan.workload, seed=plan.seed, **plan.options).prepare()
    first = not int(os.environ["RANK"])
    if first or output.is_named:
        output.prepare()
    if output.is_named:
        plan.checkpoint = output.checkpoint
    if not first:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # so that rank 0 does not wait for us when the launcher ends us
        raise typer.Exit(join(plan, command(), progress.quiet)[1])
    earlier = output.earlier() if plan.resume else None
    output.conclude(*join(plan, _commands(earlier), output.lines(plan), output.record), earlier)


def _commands(earlier: Record | None) -> str:
    """This command; of a run that is resumed, below those that it takes to do it all again."""
    before = earlier.command.splitlines() if earlier else []
    return "\n".join(dict.fromkeys([*before, command()]))


def _absolute(text: str) -> str:
    """Full path of a recipe file, since ranks may run in another folder; links are not resolved."""
    return str(Path(text.strip()).absolute()) if text.strip().endswith(".toml") else text


def _short(text: str) -> str:
    return Path(text.strip()).stem if text.strip().endswith(".toml") else text


def _unused(name: str, taken: dict[str, Any]) -> str:
    if name not in taken:
        return name
    return next(f"{name} #{i}" for i in range(2, 1000) if f"{name} #{i}" not in taken)
