"""Ranks that may die: what `attach` refuses with them, and how one that comes back learns whether it is set up as the others."""

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.core.errors import AttachError, PeerError
from gossamer.fabrics.torch import TorchFabric
from gossamer.integrations.handshake import differences
from gossamer.recipe import Recipe
from gossamer.runtime import Worker


def refuse_members(recipe: Recipe, nodes: object, weight: float) -> None:
    """Before anybody waits for this rank."""
    if not recipe.schedule.outlives:
        raise AttachError(
            f"members() with {recipe}: it waits for all ranks, and one that dies ends it; use decoupled_diloco, or "
            "torch.distributed.init_process_group() instead"
        )
    if nodes is not None:
        raise AttachError("members() with nodes=: ranks of one node would wait for one that is lost; leave nodes out")
    if weight != 1.0:
        raise AttachError(
            f"members() with weight={weight:g}: what a rank counts is a share of all, who are not always there; leave it out, and "
            "learners count by their steps"
        )


def post_fingerprint(worker: Worker, facts: dict[str, Any], fabric: TorchFabric) -> None:
    """How all are set up, for those who come back."""
    if fabric.members is not None and worker.number == 0:
        fabric.members.beginning.raise_flag("setup", json.dumps(facts))


def compare_with_the_first(worker: Worker, facts: dict[str, Any], fabric: TorchFabric) -> None:
    """This process comes to others that are at work: it must be set up as they are."""
    assert fabric.members is not None
    store = fabric.members.beginning
    if not store.flag_is_up("setup"):
        return  # its writer was lost as soon as they began
    (text,) = store.read(["setup"])
    lines = differences([json.loads(text), json.loads(json.dumps(facts))])
    if lines:
        raise PeerError(
            f"rank {worker.number} has come back, and is not set up as the others (0 is them, 1 is this one):\n  "
            + "\n  ".join(lines)
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
                f"rank {self._worker.number} has come back, and {len(frozen)} of its frozen parameters differ from those of the "
                f"others: {named}. It has taken rank {giver}'s; start it from the same base, so that they need not be sent",
                RuntimeWarning,
                stacklevel=2,
            )


def tell(step: int, rank: int, lost: Sequence[int], back: Sequence[int]) -> None:
    """The user shall know; training goes on."""
    for ranks, what in ((lost, "lost; the others go on, and it may come back"), (back, "there again")):
        for other in ranks:
            warnings.warn(f"rank {rank}, step {step}: rank {other} is {what}", RuntimeWarning, stacklevel=2)
