"""Elastic checks: what `attach` refuses under `members()`, and how a rank that comes back compares its set-up."""

import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.core.errors import AttachError, PeerError
from gossamer.core.schedule import Elastic
from gossamer.exchanges import AllReduced, Gather, Nodes, Scatter
from gossamer.fabrics.liveness.members import Members
from gossamer.fabrics.torch.fabric import TorchFabric
from gossamer.integrations.handshake import differences
from gossamer.recipe import Recipe
from gossamer.runtime import Worker, local_part
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
    if why := _cannot_go_on(recipe, per_node):
        raise AttachError(f"members() with {recipe}: {why}; or use torch.distributed.init_process_group() instead")


def _cannot_go_on(recipe: Recipe, per_node: int) -> str:
    """Why a recipe cannot go on when a rank is lost, and what to use; empty if it can."""
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


def post_fingerprint(worker: Worker, facts: dict[str, Any], fabric: TorchFabric) -> None:
    """Store the set-up of all ranks, for ranks that come later."""
    if fabric.members is not None and worker.rank == 0:
        fabric.members.beginning.raise_flag("setup", json.dumps(facts))


def compare_with_the_first(worker: Worker, facts: dict[str, Any], fabric: TorchFabric) -> None:
    """Raise an error if this process, which joins others at work, is set up differently."""
    assert fabric.members is not None
    store = fabric.members.beginning
    if not store.flag_is_up("setup"):
        return  # the rank that stores it was lost at the start
    (text,) = store.read(["setup"])
    lines = differences([json.loads(text), json.loads(json.dumps(facts))])
    if lines:
        raise PeerError(
            f"rank {worker.ranks.number} has come to others that train, and its set-up differs (0: the others, 1: this rank):\n  "
            + "\n  ".join(lines)
            + "\nGive it the same arguments and model, and the same version of gossamer."
        )


class Untrained:
    """A model's frozen parameters and its buffers: whoever comes back takes them from one who was at work."""

    def __init__(self, model: nn.Module, worker: Worker) -> None:
        self._model, self._worker = model, worker

    def tensors(self) -> dict[str, Tensor]:
        trained = {id(param.parameter) for param in self._worker.params.values()}
        frozen = {n: p for n, p in self._model.named_parameters() if id(p) not in trained}
        held: dict[str, Tensor] = frozen | dict(self._model.named_buffers())
        return {name: local_part(tensor.detach()) for name, tensor in held.items()}

    @torch.no_grad()
    def take(self, values: Mapping[str, Tensor], giver: int) -> None:
        """These differ from the giver's. That buffers do is no surprise, for they run; another base is one."""
        held, parameters = self.tensors(), dict(self._model.named_parameters())
        for name, value in values.items():
            held[name].copy_(value)
        if frozen := [name for name in values if name in parameters]:
            named = ", ".join(map(repr, frozen[:5])) + (f" and {len(frozen) - 5} more" if len(frozen) > 5 else "")
            warnings.warn(
                f"rank {self._worker.ranks.number} has come, and {len(frozen)} of its frozen parameters differ from those of the "
                f"others: {named}. It has taken rank {giver}'s; start it from the same base, so that they need not be sent",
                RuntimeWarning,
                stacklevel=2,
            )


LOST = "is lost; the others go on, and it may come back"
LEFT = "has left, and the others have taken on what it owed; they go on, and it may come back"


def warn_of_changes(
    step: int, rank: int, lost: Sequence[int], back: Sequence[int], left: Sequence[int], known: Collection[int]
) -> None:
    """Warn the user of ranks that were lost, have left, are back, or have come for the first time (not `known`)."""
    for ranks, what in ((lost, LOST), (left, LEFT), (back, "is back")):
        for other in ranks:
            said = what if other in known else "has come"
            warnings.warn(f"rank {rank}, step {step}: rank {other} {said}", RuntimeWarning, stacklevel=2)
