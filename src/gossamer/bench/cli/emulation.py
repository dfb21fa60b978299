"""Options of an emulated accelerator, and what they exclude: with waits in place of computing, nothing is learned."""

from typing import TYPE_CHECKING, Annotated

import typer

from gossamer.bench.cli.errors import InputError

if TYPE_CHECKING:
    from gossamer.bench.compare import ComparePlan

Compute = Annotated[
    str | None,
    typer.Option(
        help="Emulate an accelerator: forward and backward wait for '150ms', '150ms lognormal 0.2' or "
        "'150ms exponential 30ms' in place of computing. Losses mean nothing then."
    ),
]
Timing = Annotated[
    bool, typer.Option("--timing", help="Compare steps, not quality: every recipe trains for --steps steps.")
]


def check_compute(text: str | None) -> str:
    """The text of --compute, which must be one that ranks can read; empty if the option was not given."""
    from gossamer.bench.workloads.computing import ComputeTime  # it needs torch, and other commands do not

    if text is not None:
        ComputeTime.of(text)
    return text or ""


def compare_steps(plan: "ComparePlan", timing: bool, compute: str | None) -> None:
    """Make a comparison one of steps, if --timing says so. --compute needs it: there is no quality to compare."""
    plan.compute, plan.timing = check_compute(compute), timing
    if timing:
        plan.baseline = ""  # a quality to reach; without it all have as many steps
    elif compute is not None:
        raise InputError("--compute emulates computing, so no quality can be compared: add --timing to compare steps")
