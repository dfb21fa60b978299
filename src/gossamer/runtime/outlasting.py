"""Which recipes go on when a rank is lost, under `members()`."""

from gossamer.core.schedule import Elastic
from gossamer.exchanges import AllReduced, Gather, Nodes, Scatter
from gossamer.recipe import Recipe


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
