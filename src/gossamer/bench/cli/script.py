"""gossamer compare --script: compare recipes on the user's own training script."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import typer

from gossamer.bench.cli.errors import InputError
from gossamer.bench.cli.pass_through import arguments
from gossamer.bench.cli.run_output import RunOutput, command, is_a_rank
from gossamer.bench.compare.baselines import BASELINES
from gossamer.bench.compare.script_launch import ScriptError, check_script, join_script, launch_script
from gossamer.bench.compare.script_observer import ScriptPlan
from gossamer.bench.lab import parse_links
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
STARTED = "--rate shapes a network that gossamer starts ranks in; here a launcher has started them"


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


def refuse_uneven_hosts(per_host: int) -> None:
    """Refuse ranks of a launcher that do not fill hosts: bytes of a host would be those of another number of ranks."""
    if is_a_rank() and int(os.environ["WORLD_SIZE"]) % per_host:
        raise InputError(f"--per-host {per_host} does not divide the {os.environ['WORLD_SIZE']} ranks of the launcher")


def plan_of(ctx: typer.Context, script: Path, contenders: dict[str, str], folder: Path | None) -> ScriptPlan:
    """Check the script and the options, before anything is started."""
    for name, why in THEIRS.items():
        if is_said(ctx, name):
            raise InputError(f"--{name} has no effect with --script: {why}")
    script = script.absolute()
    check_script(script)
    for kind in contenders.values():
        if kind in BASELINES and kind not in PLAIN:
            raise InputError(f"the baseline {kind!r} trains our workloads only; with --script give 'ddp' or 'compute'")
        if kind not in PLAIN and "ddp.register(" in script.read_text(errors="replace"):
            _check_for_ddp(kind)
    return ScriptPlan(str(script), arguments(ctx), contenders, folder=str(folder.absolute()) if folder else "")


def _check_for_ddp(kind: str) -> None:
    try:
        ddp.check(Recipe.of(kind), sees_rates=True)  # the script may pass the optimizer
    except AttachError as error:
        raise InputError(f"{kind} with DistributedDataParallel: {error}") from None


def _make_folder(folder: str) -> None:
    """Make a folder to run the script in, where it is missing; refuse one that its ranks could not enter."""
    try:
        with suppress(FileExistsError):
            os.makedirs(folder, exist_ok=True)
        os.stat(f"{folder}/.")
    except OSError as error:
        raise InputError(f"--cwd: the script cannot run in {folder}: {error.strerror}; give another folder") from None


def run(plan: ScriptPlan, hosts: int, rate: str | None, output: RunOutput) -> NoReturn:
    """Start ranks here or in a lab, or take part as one that a launcher has started: then rank 0 keeps the record."""
    refuse_uneven_hosts(plan.per_host)
    if rate is not None:
        parse_links(rate, hosts)
        if is_a_rank():
            raise InputError(STARTED)
    for name in plan.contenders if plan.folder else ():
        _make_folder(plan.of(name).folder)
    if is_a_rank() and int(os.environ["RANK"]):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise typer.Exit(join_script(plan, command(), lambda event: None, None)[1])
    is_new = not output.is_named or not output.folder.exists()
    parents = [p for p in output.folder.parents if not p.exists()]
    output.prepare()
    try:
        with output.shown(plan) as show:
            if is_a_rank():
                record, code = join_script(plan, command(), show, output.record)
            else:
                record, code = launch_script(plan, hosts, rate, command(), show, output.record)
    except ScriptError:
        for path in [output.folder, *parents] if is_new else []:  # the innermost first; one that is not empty stays
            with suppress(OSError):
                path.rmdir()
        raise
    output.conclude(record, code)
