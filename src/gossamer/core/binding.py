"""What a recipe is bound to: the number of ranks, the model and its optimizers."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gossamer.core.bucket import Layout
from gossamer.core.errors import AttachError

if TYPE_CHECKING:
    from torch.optim import Optimizer

# Step counters of torch's optimizers: for a scalar parameter they have the shape of a momentum.
COUNTERS = ("step", "eta", "mu", "mu_product")
# Running means of gradients (1) and of their squares (2).
MOMENTS = {"exp_avg": 1, "momentum_buffer": 1, "exp_avg_sq": 2}


class Binding(NamedTuple):
    """The ranks, the model's buckets and the optimizers that a recipe is bound to.

    `optimizers` is empty where a recipe is only checked or counted and does not train.
    """

    size: int
    layouts: Sequence[Layout]
    optimizers: "Sequence[Optimizer]" = ()
    traits: frozenset[str] = frozenset()  # the traits of all parts of the recipe
    shapes: Mapping[str, tuple[int, ...]] = {}  # of whole parameters, where layouts may be of shards

    @property
    def trains_alone(self) -> bool:
        """True if there is one rank, which trains without communication."""
        return self.size == 1 and bool(self.optimizers)

    def other_than_sgd(self, fits: Callable[[Mapping[str, Any]], bool]) -> "Optimizer | None":
        """The first optimizer that is not torch.optim.SGD, or has a parameter group that does not fit."""
        for optimizer in self.optimizers:
            if not all(_is_sgd(group) and fits(group) for group in optimizer.param_groups):
                return optimizer
        return None

    def refuse_momentum(self, part: object, momentum: float, without: str = "momentum=0.0 in the recipe") -> None:
        """Raise AttachError if an optimizer and a part both have momentum, which would then be added twice."""
        for optimizer in self.optimizers if momentum else ():
            if any(map(_has_momentum, optimizer.param_groups)):
                raise AttachError(
                    f"{part} with {type(optimizer).__name__}: both add momentum, so that steps would be many times as long as "
                    f"either makes them; use torch.optim.SGD with momentum=0, or leave it to the optimizer: {without}"
                )


def is_buffer(key: str, value: object) -> bool:
    """True if an entry of an optimizer's state is a tensor and no counter, nor codes, as an optimizer with 8-bit state keeps."""
    return key not in COUNTERS and isinstance(value, Tensor) and value.is_floating_point()


def buffers_after_a_step(optimizer: "Optimizer", group: Mapping[str, Any]) -> frozenset[str]:
    """The names of the buffers that an optimizer keeps of a parameter in this group, found by a step of a copy."""
    p = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.float32, device="cpu"))
    like = type(optimizer)([{**group, "params": [p]}])  # pyright: ignore[reportCallIssue]
    p.grad = torch.ones_like(p)
    like.step()
    kept: Mapping[str, Any] = like.state.get(p, {})
    return frozenset(key for key, t in kept.items() if is_buffer(key, t) and t.shape == p.shape)


def _is_sgd(group: Mapping[str, Any]) -> bool:
    """True if a parameter group is that of torch.optim.SGD, not of an optimizer that scales its steps."""
    return {"momentum", "dampening", "nesterov"} <= group.keys() and "eps" not in group


def _has_momentum(group: Mapping[str, Any]) -> bool:
    """True if an optimizer's parameter group has momentum, that of the Adam family included."""
    return group.get("momentum", 0) != 0 or next(iter(group.get("betas", (0,)))) != 0
