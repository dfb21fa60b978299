"""gossamer compare --script: compare recipes on the user's own training script."""

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import typer

from gossamer.bench.cli.errors import InputError
from gossamer.bench.cli.output import RECORD
from gossamer.bench.cli.pass_through import arguments
from gossamer.bench.compare.baselines import BASELINES
from gossamer.bench.compare.events import OnEvent, RankEvent
from gossamer.bench.compare.script_launch import ScriptError, ScriptPlan, check_script, join_script, launch_script
from gossamer.bench.lab import parse_links
from gossamer.bench.record import Record
from gossamer.core.errors import AttachError
from gossamer.integrations import ddp
from gossamer.integrations.run_observer import PLAIN
from gossamer.recipe import Recipe

# Options that belong to workloads, and why a script has no use for them.
THEIRS = {
    "workload": "the script brings its own model and data",
    "patience": "a script cannot be made to train longer",
    "shards": "the script distributes its data itself",
    "seed": "the script draws its own numbers",
    "seeds": "the script draws its own numbers; run the command again instead",
    "lr": "the script has its own learning rate",
    "slow": "no sleep can be added to a script's steps",
    "compute": "the script computes by itself",
    "timing": "a script's steps are timed anyway",
}


@dataclass
class ScriptOptions:
    """Options of the command line."""

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
    """True if an option was given on the command line, False if it has its default."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_arguments(ctx: typer.Context, folder: Path | None) -> None:
    """Refuse options that need --script."""
    if folder:
        raise InputError("--cwd is the folder a script runs in, and there is no --script")
    if arguments(ctx):
        raise InputError(
            f"'-- {' '.join(arguments(ctx))}': arguments after -- belong to a script, and there is no --script"
        )


def plan_of(ctx: typer.Context, options: ScriptOptions) -> ScriptPlan:
    """Check the options and return the plan, before anything is started."""
    for name, why in THEIRS.items():
        if is_said(ctx, name):
            raise InputError(f"--{name} has no effect with --script: {why}")
    script = options.script.absolute()
    check_script(script)
    for kind in options.contenders.values():
        if kind in BASELINES and kind not in PLAIN:
            raise InputError(f"the baseline {kind!r} trains our workloads only; with --script give 'ddp' or 'compute'")
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
        ddp.check(Recipe.of(kind), sees_rates=True)  # the script may pass the optimizer
    except AttachError as error:
        raise InputError(f"{kind} with DistributedDataParallel: {error}") from None


def launch(
    plan: ScriptPlan, options: ScriptOptions, folder: Path, made: list[Path], command: str, show: OnEvent
) -> tuple[Record, int]:
    """Start the ranks here or in a lab; remove the new folder if the script is refused."""
    try:
        return launch_script(plan, options.hosts, options.rate, command, show, folder / RECORD)
    except ScriptError:
        _remove(made)
        raise


def join(
    plan: ScriptPlan, options: ScriptOptions, folder: Path, made: list[Path], command: str, show: OnEvent
) -> tuple[Record, int]:
    """Take part as one of a launcher's ranks. Rank 0 keeps the record; the other ranks exit here."""
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
    """Remove the folders that this command made, if they are empty."""
    for path in made:
        with suppress(OSError):
            path.rmdir()


def missing_folders(folder: Path) -> list[Path]:
    """Folders that must be made for this one, the innermost first."""
    return [p for p in (folder, *folder.parents) if not p.exists()]


def _ignore(event: RankEvent) -> None:
    """Rank 0 shows it."""
