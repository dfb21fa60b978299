"""Elastic checks: what `attach` refuses under `members()`, and how a rank that comes back compares its set-up."""

import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.core.errors import AttachError, PeerError
from gossamer.core.schedule import Elastic
from gossamer.fabrics.liveness.members import Members
from gossamer.fabrics.torch.fabric import TorchFabric
from gossamer.integrations.handshake import differences
from gossamer.recipe import Recipe
from gossamer.runtime import Worker


def refuse_members(group: Members, recipe: Recipe, nodes: object) -> None:
    """Refuse what `members()` does not support, before other ranks wait for this one."""
    if not isinstance(recipe.schedule, Elastic):
        raise AttachError(
            f"members() with {recipe}: it waits for all ranks, so the loss of one rank ends training; use decoupled_diloco, or "
            "torch.distributed.init_process_group() instead"
        )
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
        return frozen | dict(self._model.named_buffers())

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


def tell(step: int, rank: int, lost: Sequence[int], back: Sequence[int], known: Collection[int]) -> None:
    """Warn the user of ranks that were lost, are back, or have come for the first time (not `known`); training goes on."""
    for ranks, what in ((lost, "is lost; the others go on, and it may come back"), (back, "is back")):
        for other in ranks:
            said = what if other in known else "has come"
            warnings.warn(f"rank {rank}, step {step}: rank {other} {said}", RuntimeWarning, stacklevel=2)
