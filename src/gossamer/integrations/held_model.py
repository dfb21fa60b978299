"""How a rank holds a model: whole, or as the shards that FSDP2 leaves it (`fsdp.py`)."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from gossamer.fabrics.liveness.heartbeat import Patience
from gossamer.fabrics.torch.fabric import TorchFabric
from gossamer.integrations.checks.wrappers import is_fsdp2
from gossamer.integrations.ddp_wrapper import syncs
from gossamer.integrations.groups import Given
from gossamer.recipe import Recipe
from gossamer.runtime import ReplicaRanks, WholeReplica, local_part


class HeldModel(Protocol):
    """What the training loop's hooks ask about a model. Where every rank holds the whole model there is little to do."""

    replica: ReplicaRanks  # the ranks that hold the model together

    def group_of(self, given: Given) -> Given:
        """The ranks that hold the same part, among which gradients are averaged."""
        return given

    def connect(self, size: int, deadline: float, patience: Patience) -> None:
        """Connect the ranks of this replica, one of `size`."""

    def meet_others_over(self, fabric: TorchFabric) -> None:
        """Under members(): the other replicas are met over this fabric, and may be lost."""

    def check(self, named: Mapping[str, Tensor], recipe: Recipe) -> None:
        """Raise an error if gossamer cannot train it so."""

    def agreed(self, refusal: Exception | None, facts: dict[str, Any]) -> Exception | None:
        """This rank's refusal, or another rank's of the replica, or that these facts differ between its ranks."""
        return refusal

    def take_over(self) -> None:
        """Stop whatever else averages gradients between replicas."""

    def syncs(self, parameter: Tensor) -> bool:
        """False while micro-batches only accumulate."""
        ...

    def scale(self, parameter: Tensor, gradient: Tensor) -> None:
        """Multiply a gradient, so that its mean over replicas is what the user's loop expects."""

    @property
    def scales(self) -> bool:
        """True if `scale` multiplies, and so must see each gradient once a step."""
        return False

    def refuse_to_add(self) -> None:
        """Raise an error if a backward pass must not add to gradients that were scaled before."""

    def remove(self) -> None:
        """Give the model back as it was."""


class WholeModel(HeldModel):
    """A model that every rank holds whole. The training loop calls `looped`: the model, or DDP around it."""

    def __init__(self, looped: nn.Module) -> None:
        self._looped = looped
        self.replica: ReplicaRanks = WholeReplica()

    def syncs(self, parameter: Tensor) -> bool:
        return syncs(self._looped)


def held(looped: nn.Module) -> HeldModel:
    """How this rank holds the model that its training loop calls."""
    if not any(map(is_fsdp2, looped.modules())):
        return WholeModel(looped)
    from gossamer.integrations.fsdp import ShardedModel

    return ShardedModel(looped)


def cut_again(model: nn.Module) -> None:
    """Leave this rank its shards alone, if FSDP2 cuts the model.

    After a forward pass without gradients FSDP2 keeps parameters gathered, and would not see what is written to a shard.
    """
    for module in model.modules():
        if is_fsdp2(module):
            reshard: Any = module.reshard
            reshard()


def parts_of_parameters(model: nn.Module) -> dict[str, Tensor]:
    """This rank's part of every parameter."""
    cut_again(model)
    return {name: local_part(p.detach()) for name, p in model.named_parameters()}


def parts_of(model: nn.Module) -> dict[str, Tensor]:
    """This rank's part of every parameter, and the buffers."""
    return parts_of_parameters(model) | {name: local_part(b.detach()) for name, b in model.named_buffers()}
