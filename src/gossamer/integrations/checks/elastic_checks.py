"""Elastic checks: what `attach` refuses under `members()`."""

from gossamer.core.errors import AttachError
from gossamer.core.schedule import Elastic
from gossamer.fabrics.liveness.members import Members
from gossamer.recipe import Recipe
from gossamer.runtime.outlasting import cannot_go_on
from gossamer.two_levels import in_two_levels


def refuse_members(group: Members, recipe: Recipe, nodes: object, scaler: object = None) -> None:
    """Refuse what `members()` does not support, before other ranks wait for this one."""
    if nodes not in (None, "members"):
        raise AttachError(
            f"members() with nodes={nodes!r}: the number of nodes changes, and the ranks of a node would wait for a lost rank; leave nodes "
            "out, or start each node by a torchrun of its own, and give nodes='members'"
        )
    if nodes == "members" and group.node.size == 1:
        raise AttachError(
            "nodes='members' and members of one rank each: leave nodes out, or start each node by a torchrun of its own, with "
            "--nproc-per-node"
        )
    if group.by_shard:
        _refuse_shards(recipe, nodes)
    if recipe.schedule.shape.outlasts == "flights" and (group.by_shard or nodes == "members"):
        raise AttachError(
            f"members() with {recipe} and nodes of {group.node.size} ranks: averages in flight run again on each rank by itself, and the "
            "ranks of a node have to do so together; use a schedule without a delay, such as local_sgd(8) or diloco(30)"
        )
    per_node = group.node.size if nodes == "members" else 1
    refuse_recipe(recipe if per_node == 1 else in_two_levels(recipe, per_node), per_node)
    if scaler is not None and not isinstance(recipe.schedule, Elastic):
        raise AttachError(
            "members() with scaler=: a step that is dropped has no gradients, which a GradScaler takes for a mistake; train in "
            "bfloat16, which needs no scaler"
        )


def _refuse_shards(recipe: Recipe, nodes: object) -> None:
    """Refuse what cannot be where the ranks of a node hold shards of one model."""
    if nodes is not None:
        raise AttachError(
            f"members() with nodes={nodes!r} and a model that FSDP2 shards: each rank averages with those of the same shard already; leave "
            "nodes out"
        )
    if isinstance(recipe.schedule, Elastic):
        raise AttachError(
            f"members() with {recipe} and a model that FSDP2 shards: each shard would decide for itself when to answer a round; use a "
            "recipe whose ranks meet at fixed steps, such as local_sgd(8)"
        )
    if recipe.schedule.shape.outlasts == "models":
        raise AttachError(
            f"members() with {recipe} and a model that FSDP2 shards: gossip outlives a lost node by an average of all models, and the "
            "shards of a node would take it at two steps; use a recipe that averages, such as allreduce + local_sgd(8)"
        )


def refuse_recipe(recipe: Recipe, per_node: int = 1) -> None:
    """Refuse a recipe that cannot go on without a lost rank; `per_node` ranks are lost, and come, together."""
    if why := cannot_go_on(recipe, per_node):
        raise AttachError(f"members() with {recipe}: {why}; or use torch.distributed.init_process_group() instead")
