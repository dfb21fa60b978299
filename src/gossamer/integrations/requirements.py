"""What a host asks of a recipe: terms, judged together with those of its parts."""

from collections.abc import Sequence
from typing import NamedTuple

from gossamer.combinations import ways
from gossamer.core.constraints import Constrained, Constraint, agree, excludes, requires
from gossamer.core.errors import AttachError, RecipeError
from gossamer.recipe import Recipe


class Requirements(NamedTuple):
    """A host's side: it gives nothing, and has terms."""

    constraints: Sequence[Constraint]
    traits: frozenset[str] = frozenset()


class _Named(NamedTuple):
    """The recipe as a whole, for sentences that speak of it."""

    recipe: Recipe
    traits: frozenset[str] = frozenset()
    constraints: tuple[Constraint, ...] = ()

    def __str__(self) -> str:
        return str(self.recipe)


def refuse(recipe: Recipe, *constraints: Constraint) -> None:
    """Refuse a recipe that a host cannot serve, on any way that a parameter may go."""
    host: dict[str, Constrained] = {"host": Requirements(constraints), "recipe": _Named(recipe)}
    try:
        for way in ways(recipe):
            agree({**way, **host})
    except RecipeError as refusal:
        raise AttachError(str(refusal)) from None


MORE = "{recipe} is more than a gradient average; use gossamer.attach(ddp_model, optimizer, ...)"
UNSEEN = "acts on the optimizer, which a DDP hook does not see; use gossamer.attach"
HOOK = (
    excludes("waits for few", because=MORE),
    requires("averages gradients", because=MORE),
    excludes("moves schedule", because="{controller} " + UNSEEN),
    excludes("lags", because="{schedule} has no mean at some steps, and DDP insists on one; use gossamer.attach"),
    excludes("accumulates", "own step", "resyncs", because="{schedule} " + UNSEEN),
    excludes("directs", because="{update} " + UNSEEN),
    excludes(
        "follows rate", because="{recipe} follows the learning rate, which a DDP hook does not see; use gossamer.attach"
    ),
)
"""What a communication hook can do: average gradients."""

SCALED = (
    excludes(
        "waits for few",
        because="{schedule} with a GradScaler: a late rank would apply missed updates under another scale; use bf16",
    ),
    excludes(
        "lags",
        because="{schedule} with a GradScaler: a mean would land under another scale than its gradients were made with; use bf16",
    ),
)
UNTOLD = "a GradScaler calls optimizer.step(), and attach does not know of it: "
UNTOLD_MEANS = (
    excludes(
        "memory",
        because=UNTOLD
        + "{memory} would keep gradients of one loss scale and send them under another; say attach(..., scaler=scaler)",
    ),
)
UNTOLD_MOMENTUM = (
    excludes(
        "sends momentum",
        because=UNTOLD
        + "{update} would add gradients of one loss scale to a momentum of another; say attach(..., scaler=scaler)",
    ),
)
UNTOLD_LOCAL = (
    requires(
        "averages gradients",
        because=UNTOLD
        + "under {schedule} a rank whose scaler skips a step would fall behind the others; say attach(..., scaler=scaler)",
    ),
)


def for_all_ranks(what: str) -> Constraint:
    """An option that needs all ranks at every step."""
    because = f"{{schedule}} with {what}: that needs all ranks at every step, and late ones are not there"
    return excludes("waits for few", "is async", because=because)


UNUSED = excludes(
    "lags",
    because="{schedule} with find_unused_parameters: a step takes the mean of the step before, which used other parameters; leave "
    "find_unused_parameters out: parameters without a gradient send zero",
)
"""Parameters that no rank used at a step."""


def for_buffers(said: str) -> Constraint:
    """Buffers that are shared, as the user says."""
    because = f"buffers={said!r} under {{schedule}}: nobody ever waits for everybody, so buffers cannot be shared; say 'local'"
    return excludes("mixes", "is async", because=because)


def for_silence_on(buffer: str) -> tuple[Constraint, ...]:
    """Float buffers of which nothing was said."""
    begins = (
        f"the model has float buffers ({buffer}, ...), and under {{schedule}} they differ between ranks like parameters do; "
        "say buffers="
    )
    return (
        excludes("mixes", "is async", because=begins + "'local'"),
        requires("averages gradients", because=begins + "'average', 'broadcast' (rank 0's) or 'local'"),
    )


WEIGHTED = (
    excludes(
        "waits for few",
        because="{schedule} with weight=: who is waited for changes from step to step, and so would every weight; give all ranks "
        "batches of one size",
    ),
    excludes(
        "counts alike",
        because="{schedule} with weight=: models are averaged as if all ranks counted alike, and end at their plain mean; give all "
        "ranks shards of one size, or average every few steps with local_sgd or slowmo, without inner",
    ),
    excludes(
        "parts models",
        because="{memory} with weight=: a rank takes all of its own gradient besides, whatever its weight; use error_feedback()",
    ),
    excludes(
        "control", because="{controller} with weight=: it goes by gradients of equal batches; leave the controller out"
    ),
    excludes(
        "votes",
        because="{exchange} with weight=: what is multiplied has the same vote as before; use ef_signsgd, or give all ranks "
        "batches of one size",
    ),
)
"""What can be done where ranks count differently."""


__all__ = [
    "HOOK",
    "SCALED",
    "UNTOLD_LOCAL",
    "UNTOLD_MEANS",
    "UNTOLD_MOMENTUM",
    "UNUSED",
    "WEIGHTED",
    "for_all_ranks",
    "for_buffers",
    "for_silence_on",
    "refuse",
]
