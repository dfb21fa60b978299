"""What a recipe may cost on a GPU."""

from gossamer.controllers import Fixed
from gossamer.core.contracts import Controller
from gossamer.recipe import Recipe

# Bytes a parameter beyond the model and its momentum, 4 of gradients included, that a preset keeps from step to step.
KEPT = {
    "allreduce": 4,
    "bf16": 4,
    "fp16": 4,
    "int8": 4,
    "fp8": 4,
    "natural": 4,
    "terngrad": 4,
    "qsgd": 4,
    "eden": 4,
    "drive": 4,
    "dqsgd": 4,
    "auto": 4,
    "signsgd": 8,  # the direction
    "distributed_lion": 12,  # the momentum and the direction
    "dion": 16,  # residual, what the momentum kept, and the direction
    "ef_signsgd": 12,  # residual, and what owners owe
    "demo": 13,  # residual, the direction, and tiles beyond the edge
    "onebit_sgd": 12,  # the same
    "onebit_adam": 21,  # momentum, divisor, residual, what owners owe, the direction, and who stays; the optimizer has none
    "zero_one_adam": 29,  # the same, the model that ranks met at, and, within a round, what steps since came to
    "onebit_lamb": 25,  # and the fresh second moment
    "topk": 8,  # residual
    "sparse_scatter": 12,  # residual, and what answers left out
    "gtopk": 8,  # residual
    "randk": 8,  # residual
    "ef21": 12,  # own, common
    "local_gradients": 8,  # residual
    "dgc": 8,  # residual
    "sketched_sgd": 8,  # residual
    "fetchsgd": 4,  # and two tables
    "powersgd": 8,  # residual
    "gradiveq": 10,  # residual; and of each matrix's slices what is known, or learned
    "atomo": 4.2,  # and a little for its matrices
    "diana": 12,  # own, common
    "dqgd": 12,  # the same, which stay as they are
    "local_sgd": 8,  # anchor
    "post_local": 8,  # anchor
    "hierarchical": 8,  # anchor
    "slowmo": 12,  # anchor, velocity
    "bmuf": 12,  # anchor, velocity
    "diloco": 12,  # anchor, velocity
    "streaming_diloco": 16,  # anchor, velocity, message
    "eager_diloco": 28,  # anchor, velocity, agreed, pace, own, message
    "decoupled_diloco": 28,  # anchor, velocity, start, message, what the next one is made of, and what is agreed on
    "async_diloco": 32,  # the same, and arrivals since the velocity moved
    "sparse_loco": 12,  # anchor, residual
    "lookahead": 8,  # anchor
    "minibatch": 4,
    "accelerated": 8,  # x, aggregate, and no momentum
    "inner_outer": 12,  # anchor, moved
    "slowmo_sgp": 12,  # anchor, velocity; x is the model, between two ranks
    "overlap_local_sgd": 16,  # anchor, velocity, message
    "cocod": 16,  # anchor, start, message
    "easgd": 12,  # anchor, message
    "des_loc": 8,  # anchor
    "edit": 12,  # anchor, velocity
    "sparta": 4,
    "noloco": 20,  # anchor, velocity, and letters out and in
    "sgp": 4,
    "osgp": 20,  # x, z, a letter out and a letter in
    "gossip_pga": 4,
    "d_psgd": 16,  # x, and letters out and in
    "ad_psgd": 20,  # the model that is answered from, what it is owed, a question and an answer
    "async_sgd": 20,  # the model, the one before a step, the step, and a letter out and in
    "choco_sgd": 16,  # belief, pull
    "backup": 8,  # the settled mean
    "accordion": 12,  # residual, and sums in watched epochs
    "accordion_qsgd": 8,  # sums in watched epochs
    "accordion_topk": 12,  # residual, and sums in watched epochs
    "accordion_batch": 8,  # sums in watched epochs
}
CRUMBS = 0.5  # bytes a parameter of scales, tables and numbers, in a model as small as the judges'
PEAK = 8  # bytes a parameter that may come on top for a while
PEAKS = {  # of those that choose among a whole block, look at whole matrices, or make a step of a second moment in their warm-up
    "ef21": 9,
    "accordion_topk": 9,
    "onebit_sgd": 10,
    "onebit_adam": 14,
    "zero_one_adam": 14,
    "onebit_lamb": 24,
    "dion": 10,
    "noloco": 12,  # the model sent, the one received, and their differences
}
ACTIVATIONS = 2.0  # and what the judges' own model needs in its passes
CHANCE = 1.0  # and by how much two runs of the same may differ: lanes let go in an order of chance

# Launches a step that one more parameter may cost: its gradient into the bucket, its mean out of it; and what some
# methods do tensor by tensor. With three ranks: what is done for each tensor and each rank is found here.
COPIES = 2
TENSOR_BY_TENSOR = {
    "topk": 10,  # each tensor's largest
    "sparse_scatter": 20,  # the same, twice
    "ef21": 10,
    "local_gradients": 12,  # the same, and its model read and written
    "atomo": 6,  # each matrix plus its atoms, for every rank
    "dgc": 10,
    "demo": 60,  # each tensor's tiles and their places, there and back for every rank
    "sparse_loco": 45,  # the same, and the bins of its values
    "onebit_sgd": 60,  # each matrix's rows, for every rank, in both phases
    "onebit_lamb": 40,  # each tensor's norms, ratios and averages
    "gradiveq": 10,  # each matrix's directions, while it learns them
    "dqsgd": 3,  # norms of each layer, and each run of neighbours that have one width
    "powersgd": 5,  # each matrix times its factors
    "dion": 60,  # the same, and each matrix's step
    "accordion": 8,  # the same, and each gradient's sum and norm
    "accordion_qsgd": 4,
    "accordion_topk": 14,
    "accordion_batch": 4,
}


def syncs(recipe: Recipe) -> float:
    """How often the host may wait for the device, a step."""
    if "waits for few" in recipe.schedule.traits:
        return 2  # once more before it claims its place: who is first is for the devices to say
    if not (recipe.schedule.shape.averages_gradients or recipe.schedule.shape.mixes or "push_sum" in repr(recipe)):
        every = getattr(recipe.schedule, "every", 1)
        if recipe.schedule.shape.is_async:
            apart = getattr(recipe.schedule, "delayed", None) is not None  # then an arrival may be a round of its own
            return (2 + apart) / every  # once more before it claims its place
        if recipe.schedule.shape.skips_steps:
            return (
                2 / recipe.schedule.shape.period
            )  # once more for what ranks tell of their speed, when the average has come
        fragments = min(every, 2) if getattr(recipe.schedule, "fragments", 1) is None else 1  # each lands by itself
        guarded = getattr(recipe.schedule, "guard", None) is not None  # once more for the lengths of all differences
        counts = "zero_one" in repr(recipe)  # once more for the steps that ranks have taken
        return (fragments + recipe.controller.hears_loss + guarded + counts) / every
    if "resyncs" in recipe.schedule.traits:
        return 1 + 1 / recipe.schedule.shape.period
    watches: Controller = recipe.controller
    return 1 if isinstance(watches, Fixed) else 1 + 1 / getattr(watches, "epoch", 1)


def launches(name: str) -> float:
    """Launches a step that one more parameter may cost."""
    return TENSOR_BY_TENSOR.get(name, COPIES)
