"""All commands, by name."""

import signal
import sys
from typing import Annotated

import typer

import gossamer
from gossamer.cli import bench, doctor, heterogeneity, lab, parts, report, script, trial, tune
from gossamer.core.errors import GossamerError
from gossamer.core.text import cut

MOST = 4000  # characters that an error is told in

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


app.command("train")(trial.train)
app.command("compare", cls=script.Dashed)(trial.compare)
app.command("tune")(tune.tune)
app.command("heterogeneity")(heterogeneity.heterogeneity)
app.command("recipes")(parts.recipes)
app.command("report")(report.report)
app.command("doctor")(doctor.doctor)
theirs = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": ["--help"],
}  # -h is the command's
app.command("lab", context_settings=theirs)(lab.lab)
app.add_typer(bench.app, name="bench")


def run() -> int:
    """Run one command. Exit codes: 0 done, 1 something failed on the way, 2 wrong input, 130 interrupted."""
    try:
        code = app(standalone_mode=False)
        return code if isinstance(code, int) else 0
    except typer.Exit as exit:
        return exit.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 128 + signal.SIGINT
    except GossamerError as error:
        print(f"gossamer: {cut(str(error), MOST)}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1  # ours for wrong input are ValueErrors too
    except Exception as error:
        usage = getattr(error, "format_message", None)  # what the command line parser says of wrong options
        if usage is None:
            raise
        if words := usage():  # empty where the help has just been shown instead
            print(f"gossamer: {cut(words, MOST)}", file=sys.stderr)
        return 2
