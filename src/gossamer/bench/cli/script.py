"""gossamer compare --script: recipes compared on somebody's own training script."""

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from gossamer.bench.cli import progress
from gossamer.bench.cli.errors import InputError
from gossamer.bench.cli.output import RECORD
from gossamer.bench.cli.pass_through import arguments
from gossamer.bench.compare.baselines import BASELINES
from gossamer.bench.compare.script_launch import ScriptError, ScriptPlan, check_script, join_script, launch_script
from gossamer.bench.lab import parse_links
from gossamer.bench.record import Record
from gossamer.core.errors import AttachError
from gossamer.integrations import ddp
from gossamer.integrations.run_observer import PLAIN
from gossamer.recipe import Recipe

# What belongs to workloads, and what a script says of these things itself.
THEIRS = {
    "workload": "the script brings its own model and data",
    "patience": "a script cannot be told to train on",
    "shards": "the script deals out its data itself",
    "seed": "the script draws its own numbers",
    "seeds": "the script draws its own numbers; run the command again instead",
    "lr": "the script has its own learning rate",
    "slow": "a script's steps cannot be slept in",
}


@dataclass
class ScriptOptions:
    """What the command line said."""

    script: Path
    contenders: dict[str, str]
    hosts: int
    per_host: int
    rate: str | None
    chunk: int
    deadline: float
    imports: list[str]
    steps: int  # 0: until the script ends
    folder: Path | None
    quiet: bool
    as_json: bool


def is_said(ctx: typer.Context, name: str) -> bool:
    """Was it said on the command line, or is it what it is by default?"""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_arguments(ctx: typer.Context, folder: Path | None) -> None:
    """What only a script has a use for."""
    if folder:
        raise InputError("--cwd is where a script runs, and there is no --script")
    if arguments(ctx):
        raise InputError(f"'-- {' '.join(arguments(ctx))}': words after -- are a script's, and there is no --script")


def plan_of(ctx: typer.Context, options: ScriptOptions) -> ScriptPlan:
    """Everything that can be said before anything is started."""
    for name, why in THEIRS.items():
        if is_said(ctx, name):
            raise InputError(f"--{name} says nothing to a script: {why}")
    script = options.script.absolute()
    check_script(script)
    for kind in options.contenders.values():
        if kind in BASELINES and kind not in PLAIN:
            raise InputError(
                f"the yardstick {kind!r} trains our workloads; beside a script there are 'ddp' and 'compute'"
            )
        if kind not in PLAIN and "ddp.register(" in script.read_text(errors="replace"):
            _check_for_ddp(kind)
    if options.rate is not None:
        parse_links(options.rate, options.hosts)
    return ScriptPlan(
        str(script),
        arguments(ctx),
        options.contenders,
        options.deadline,
        options.chunk,
        options.per_host,
        options.imports,
        options.steps,
        str(options.folder.absolute()) if options.folder else "",
    )


def _check_for_ddp(kind: str) -> None:
    try:
        ddp.check(Recipe.of(kind), sees_rates=True)  # the script may give it the optimizer
    except AttachError as error:
        raise InputError(f"{kind} beside DistributedDataParallel: {error}") from None


def launch(
    plan: ScriptPlan, options: ScriptOptions, folder: Path, made: list[Path], command: str, show: progress.Show
) -> tuple[Record, int]:
    """Start the ranks here or in a lab. What could not be compared leaves no folder behind."""
    try:
        return launch_script(plan, options.hosts, options.rate, command, show, folder / RECORD)
    except ScriptError:
        _remove(made)
        raise


def join(
    plan: ScriptPlan, options: ScriptOptions, folder: Path, made: list[Path], command: str, show: progress.Show
) -> tuple[Record, int]:
    """A launcher has started us as one of several ranks. Rank 0 keeps the record; the others leave here."""
    if options.rate is not None:
        raise InputError("--rate shapes a network that gossamer starts ranks in; here a launcher has started them")
    if int(os.environ["RANK"]):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise typer.Exit(join_script(plan, command, _ignore, None)[1])
    try:
        return join_script(plan, command, show, folder / RECORD)
    except ScriptError:
        _remove(made)
        raise


def _remove(made: list[Path]) -> None:
    """What this command made, if nothing of worth is in it."""
    for path in made:
        with suppress(OSError):
            path.rmdir()


def missing_folders(folder: Path) -> list[Path]:
    """The folders that will be made for this one, the innermost first."""
    return [p for p in (folder, *folder.parents) if not p.exists()]


def _ignore(event: dict[str, Any]) -> None:
    """Rank 0 shows it."""
