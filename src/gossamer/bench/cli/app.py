"""All commands, by name. A command's module is imported when it is called, since torch takes seconds to load."""

import signal
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import gossamer
from gossamer.bench import cli
from gossamer.bench.cli.pass_through import PassThrough
from gossamer.core.errors import GossamerError
from gossamer.core.text import cut

MOST = 4000  # characters of an error that are printed

app = typer.Typer(
    help="Train PyTorch models over slow, uneven or unreliable networks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        print(f"gossamer {gossamer.__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train PyTorch models over slow, uneven or unreliable networks."""


HELP = {  # each line equals the first line of the command's own help; a test compares them
    "train": "Train one recipe on real processes. Started by torchrun, it joins the ranks of the launcher.",
    "compare": "Train several recipes in turns on the same data, seed and network; the first is the baseline.",
    "plan": (
        "Predict seconds, bytes and memory of recipes and of DDP on a cluster, and say which of them pays, if any does."
    ),
    "simulate": (
        "Train a workload on virtual ranks: the loss of each recipe by virtual seconds on a cluster, and by bytes."
    ),
    "tune": "Search the learning rate and the knobs of every recipe, with the same budget for all, dense included.",
    "claims": (
        "List what papers claim and what was found, or try one claim: by the rule that was fixed before it was run."
    ),
    "heterogeneity": (
        "Measure how much the ranks' gradients differ: little favours local steps, much favours large batches."
    ),
    "recipes": (
        "List recipes or parts, or explain one: what it is made of and sends, when to use it, and what it refuses."
    ),
    "explain": (
        "Follow a recipe by hand: its messages, their bytes and the state of every rank, on a few ranks with a tiny model."
    ),
    "workloads": "List the workloads, with the size of each model and its quality metric.",
    "goodput": (
        "Which share of the paid time of a run became steps that count, where the rest went, and what a step cost."
    ),
    "report": "Make the report of a run: one HTML file that works offline.",
    "doctor": (
        "Versions, kernels and their speed, network cards, the lab, and the link between two ranks on this machine."
    ),
    "lab": (
        "Run a command on every host of a small slow network: gossamer lab --hosts 4 --rate 200mbit -- python train.py"
    ),
    "bench": "Measure kernels, the noise of recipes, or whole steps.",
}
HOMES = {  # module and function; of the other commands both have the command's name
    "train": "compare.train",
    "plan": "plan.plan_command",
    "simulate": "simulate.simulate_command",
    "workloads": "recipes.workloads",
    "bench": "bench.app",
}
TELLS = ("recipes", "workloads")  # they only print, so they can be ended at any moment
WITH_ARGUMENTS = ("compare", "plan")  # of a script, after --
LAB: dict[str, Any] = {  # all that follows a command belongs to it, and so does -h
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "ignore_unknown_options": True,
    "help_option_names": ["--help"],
}


class LazyCommand(TyperCommand):
    """A command whose module is imported when it is called; until then it knows only its name and its help line."""

    def load(self) -> Any:
        assert self.name is not None
        module, name = HOMES.get(self.name, f"{self.name}.{self.name}").split(".")
        found = getattr(import_module(f"gossamer.bench.cli.{module}"), name)
        if isinstance(found, typer.Typer):
            return typer.main.get_command(found)
        alone = typer.Typer(add_completion=False)
        kind = PassThrough if self.name in WITH_ARGUMENTS else TyperCommand
        alone.command(self.name, cls=kind, context_settings=LAB if self.name == "lab" else {})(found)
        return typer.main.get_command(alone)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        loaded = self.load()
        if self.name not in TELLS:
            cli.work_begins()
        return loaded.make_context(info_name, args, parent, **extra)


COMMANDS = [LazyCommand(name, help=line) for name, line in HELP.items()]


def commands() -> TyperGroup:
    """The command group, with all commands not loaded yet."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    group.commands.update({command.name: command for command in COMMANDS if command.name})
    return group


def run() -> int:
    """Run one command. Exit codes: 0 done, 1 something failed on the way, 2 wrong input, 130 interrupted."""
    try:
        with cli.at_end:
            code = commands()(standalone_mode=False)
        return code if isinstance(code, int) else 0
    except typer.Exit as exit:
        return exit.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 128 + signal.SIGINT
    except GossamerError as error:
        print(f"gossamer: {cut(str(error), MOST)}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1  # our errors for wrong input are ValueErrors too
    except Exception as error:
        usage = getattr(error, "format_message", None)  # the command line parser's error for wrong options
        if usage is None:
            raise
        if words := usage():  # empty where the help has just been shown instead
            print(f"gossamer: {cut(words, MOST)}", file=sys.stderr)
        return 2
