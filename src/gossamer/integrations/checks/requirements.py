"""Requirements: constraints that attach and the DDP hook put on a recipe, checked with those of its parts."""

from collections.abc import Sequence
from typing import NamedTuple

from gossamer.combinations import ways
from gossamer.core.constraints import Constraint, agree, excludes, requires
from gossamer.core.errors import AttachError, RecipeError
from gossamer.recipe import Recipe


class _Required(NamedTuple):
    """The whole recipe, for error texts that quote it, and the constraints of attach or the DDP hook on its parts."""

    recipe: Recipe
    constraints: Sequence[Constraint]
    traits: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return str(self.recipe)


def refuse(recipe: Recipe, *constraints: Constraint) -> None:
    """Raise an error if the recipe breaks a constraint, for any parameter, now or after a controller's change."""
    try:
        for one in (recipe, *recipe.reached):
            for way in ways(one):
                agree({**way, "recipe": _Required(one, constraints)})
    except RecipeError as refusal:
        raise AttachError(str(refusal)) from None


MORE = "{recipe} is more than a gradient average; use gossamer.attach(ddp_model, optimizer, ...)"
UNSEEN = "acts on the optimizer, which a DDP hook does not see; use gossamer.attach"
TELL = (
    "the learning rate, which a DDP hook does not see: call gossamer.ddp.register(ddp_model, recipe, optimizer=optimizer), or use "
    "gossamer.attach"
)
HOOK = (
    excludes("waits for few", because=MORE),
    requires("averages gradients", because=MORE),
    excludes("moves schedule", because="{controller} " + UNSEEN),
    excludes(
        "lags", because="{schedule} has no mean at some steps, and DDP needs one at every step; use gossamer.attach"
    ),
    excludes("accumulates", "own step", "resyncs", because="{schedule} " + UNSEEN),
    excludes("directs", because="{update} " + UNSEEN),
)
"""Constraints of a communication hook, which can only average gradients."""
HOOK_ALONE = (
    excludes("hears rate", because="{controller} uses " + TELL),
    excludes("follows rate", because="{recipe} uses " + TELL),
)
"""Constraints of a communication hook that has no optimizer."""

SCALED = (
    excludes(
        "waits for few",
        because="{schedule} with a GradScaler: a late rank would apply missed updates under another scale; use bf16",
    ),
    excludes(
        "lags",
        because="{schedule} with a GradScaler: a mean would be applied under another scale than that of its gradients; use bf16",
    ),
)
UNTOLD = "a GradScaler calls optimizer.step(), but was not passed to attach: "
UNTOLD_MEANS = (
    excludes(
        "memory",
        "own feedback",
        "adds momentum",
        because=UNTOLD
        + "{memory} over {exchange} would keep gradients of one loss scale and send them under another; call attach(..., scaler=scaler)",
    ),
    excludes(
        "sends momentum",
        because=UNTOLD
        + "{update} would add gradients of one loss scale to a momentum of another; call attach(..., scaler=scaler)",
    ),
)
UNTOLD_LOCAL = (
    requires(
        "averages gradients",
        because=UNTOLD
        + "under {schedule} a rank would fall behind the others when its scaler skips a step; call attach(..., scaler=scaler)",
    ),
)

ADDED = excludes(
    *("adds momentum", "sends momentum", "remembers all", "lags"),
    because="several backward() passes before one optimizer.step(), each of which is averaged, under {recipe}: p.grad then holds a "
    "momentum, an estimate or an earlier mean, and no gradient to add to; run all but the last one under comm.no_sync() (with a DDP "
    "hook, ddp_model.no_sync()), or call comm.skip() and optimizer.zero_grad() where a step is left out",
)
"""Constraint of backward passes that add to averaged gradients."""


def for_all_ranks(what: str) -> Constraint:
    """Return the constraint of an option that needs all ranks at every step."""
    because = (
        f"{{schedule}} with {what}: that needs all ranks at every step, but late ranks are left out; leave {what} out"
    )
    return excludes("waits for few", "is async", because=because)


UNUSED = excludes(
    "lags",
    because="{schedule} with find_unused_parameters: a step applies the mean of the step before, which used other parameters; leave "
    "find_unused_parameters out: parameters without a gradient send zero",
)
"""Constraint of find_unused_parameters."""


def for_buffers(said: str) -> Constraint:
    """Return the constraint of buffers='average' or 'broadcast'."""
    because = f"buffers={said!r} under {{schedule}}: ranks never all wait for each other, so buffers cannot be shared; pass 'local'"
    return excludes("mixes", "is async", because=because)


def for_silence_on(buffer: str) -> tuple[Constraint, ...]:
    """Return the constraints of a model with float buffers, if `buffers` is not given."""
    begins = f"the model has float buffers ({buffer}, ...), and under {{schedule}} they differ between ranks as parameters do; pass buffers="
    return (
        excludes("mixes", "is async", because=begins + "'local'"),
        requires("averages gradients", because=begins + "'average', 'broadcast' (rank 0's) or 'local'"),
    )


WEIGHTED = (
    excludes(
        "waits for few",
        because="{schedule} with weight=: each step waits for other ranks, so every weight would change from step to step; give all "
        "ranks batches of one size",
    ),
    excludes(
        "counts alike",
        because="{schedule} with weight=: it averages models with equal weights, so they end at their plain mean; give all "
        "ranks shards of one size, or average every few steps with local_sgd or slowmo, without inner",
    ),
    excludes(
        "parts models",
        because="{memory} with weight=: a rank adds its own gradient whole, whatever its weight; use error_feedback()",
    ),
    excludes(
        "control", because="{controller} with weight=: it assumes gradients of equal batches; leave the controller out"
    ),
    excludes(
        "votes",
        because="{exchange} with weight=: a vote does not depend on the weight; use ef_signsgd, or give all ranks "
        "batches of one size",
    ),
)
"""Constraints of ranks with different weights."""
