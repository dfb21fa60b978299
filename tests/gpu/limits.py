"""What a recipe may cost on a GPU."""

from gossamer.controllers import Fixed
from gossamer.core.contracts import Controller, Quorum
from gossamer.recipe import Recipe

# Bytes a parameter beyond the model and its momentum, 4 of gradients included, that a preset keeps from step to step.
KEPT = {
    "allreduce": 4,
    "bf16": 4,
    "fp16": 4,
    "terngrad": 4,
    "qsgd": 4,
    "topk": 8,  # residual
    "powersgd": 8,  # residual
    "diana": 12,  # own, common
    "local_sgd": 8,  # anchor
    "slowmo": 12,  # anchor, velocity
    "slowmo_sgp": 20,  # x, z, anchor, velocity
    "overlap_local_sgd": 16,  # anchor, velocity, message
    "sgp": 12,  # x, z
    "osgp": 24,  # x, z, a letter out and a letter in
    "backup": 8,  # the settled mean
    "accordion": 12,  # residual, and sums in watched epochs
    "accordion_qsgd": 8,  # sums in watched epochs
    "accordion_batch": 8,  # sums in watched epochs
}
CRUMBS = 0.5  # bytes a parameter of scales, tables and numbers, in a model as small as the judges'
PEAK = 8  # bytes a parameter that may come on top for a while
ACTIVATIONS = 0.75  # and what the judges' own model needs in its passes

COPIES = 2  # launches a step that each parameter may cost: its gradient into the bucket, its mean out of it


def syncs(recipe: Recipe) -> float:
    """How often the host may wait for the device, a step."""
    if not (recipe.schedule.averages_gradients or recipe.schedule.mixes or "push_sum" in repr(recipe)):
        return 1 / getattr(recipe.schedule, "every", 1)
    if isinstance(recipe.exchange, Quorum):
        return 2  # a ticket is claimed when the device has the gradient: who is first is for the devices to say
    watches: Controller = recipe.controller
    return 1 if isinstance(watches, Fixed) else 1 + 1 / getattr(watches, "epoch", 1)


def launches(name: str) -> float:
    """Launches a step that one more parameter may cost."""
    return COPIES
