"""Which recipes go on when a rank is lost, under `members()`, and which train a model whose ranks hold shards."""

from gossamer.core.schedule import Elastic
from gossamer.exchanges import AllReduced, Gather, Nodes, Scatter
from gossamer.recipe import Recipe
from gossamer.updates.onebit_lamb_update import OneBitLambUpdate


def cannot_go_on(recipe: Recipe, per_node: int = 1) -> str:
    """Why a recipe cannot go on when a rank is lost, and what to use; empty if it can. `per_node` ranks are lost, and come,
    together.

    >>> cannot_go_on(Recipe.of("local_sgd(8)")), bool(cannot_go_on(Recipe.of("backup")))
    ('', True)
    """
    schedule = recipe.schedule
    if isinstance(schedule, Elastic):
        return ""
    if not schedule.shape.outlasts:
        return (
            f"{schedule} cannot go on without a lost rank; use every_step(), delayed(), local_sgd(), slowmo() and bmuf(momentum=) without "
            "sharded, guard, inner and buffers='average', streaming(), overlap_local_sgd(), cocod(), gossip() of push_sum() or "
            "symmetric(), or decoupled_diloco"
        )
    if "control" in recipe.controller.traits:
        return f"{recipe.controller} counts on the ranks of the start; leave the controller out"
    ways = [recipe.exchange, *(rule.exchange for rule in recipe.rules)]
    ways = [way.between if isinstance(way, Nodes) and way.per_node == per_node else way for way in ways]
    strange = [way for way in ways if not isinstance(way, AllReduced | Gather | Scatter)]
    if strange:
        return f"{strange[0]} cannot go on without a lost rank; use allreduce(), gather() or scatter()"
    if recipe.ranks_per_node not in (1, per_node):
        return "the ranks of a node would wait for a lost rank; leave per_node out"
    return ""


def cannot_shard(recipe: Recipe) -> str:
    """Why a recipe cannot train a model that FSDP2 shards, and what to use; empty if it can: no rank may decide by what it sees
    alone, for the shards of a replica would end up in unlike rounds.

    >>> cannot_shard(Recipe.of("qsgd")), bool(cannot_shard(Recipe.of("backup")))
    ('', True)
    """
    for one in (recipe, *recipe.reached):
        if isinstance(one.update, OneBitLambUpdate):
            return (
                f"{one} with a model that FSDP2 shards: its trust ratios are norms of whole parameters, and a rank holds shards; use "
                "onebit_adam"
            )
        shape, traits = one.schedule.shape, {trait for part in one.parts() for trait in part.traits}
        own_pace = shape.is_async or shape.serves or shape.skips_steps
        if own_pace or "waits for few" in traits or one.controller.moves_schedule:
            return (
                f"{one} with a model that FSDP2 shards: each shard of a replica would decide for itself which round it is in, and a "
                "model would be put together of two; use a recipe whose ranks meet at fixed steps"
            )
    return ""
