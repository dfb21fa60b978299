"""What a model costs to train on one rank, without any communication."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import prod

from gossamer.core.errors import CostError
from gossamer.core.parts import nearest

WIDTHS: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a number, by the dtype of a model's parameters, gradients and momenta."""


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """Shapes of the trained parameters, in the model's order, and the seconds of one step.

    `shares` says for each parameter which share of the backward pass is done when its gradient is there. `buckets` is set
    for a recipe: the parameters of each of its buckets.
    """

    shapes: Mapping[str, tuple[int, ...]]
    forward: float
    backward: float
    optimizer: float
    shares: Mapping[str, float]
    momenta: int = 1
    on_cores: bool = True  # forward and backward need the host's cores; an accelerator's do not
    gathering: tuple[float, float] = (0.0, 0.0)  # seconds of forward and of backward that wait for shards
    gathered: int = 0  # the most bytes of whole parameters and gradients in a backward pass of shards
    dtype: str = "fp32"  # of parameters, gradients and momenta
    wide: int = 4  # bytes of a number in a bucket: recipes average in fp32, whatever the dtype
    frozen: int = 0  # bytes of parameters that are not trained, such as the base under a LoRA, and of buffers
    name: str = ""
    source: str = "default"  # of the seconds
    waits: int = 1  # steps from one moment at which all ranks wait for the slowest to the next; 0 if they never do
    buckets: Sequence[Sequence[str]] = field(default_factory=list[Sequence[str]])

    @cached_property
    def numel(self) -> int:
        return sum(prod(s) for s in self.shapes.values())

    @property
    def width(self) -> int:
        """Bytes of a parameter's number."""
        return WIDTHS[self.dtype]

    @property
    def bytes(self) -> int:
        """Bytes of the parameters."""
        return self.width * self.numel

    @property
    def is_narrow(self) -> bool:
        """True if means are copied into gradients of fewer bits; else gradients are views of buckets."""
        return self.width < self.wide

    @property
    def computing(self) -> float:
        return self.forward + self.backward + self.optimizer

    @property
    def passes(self) -> tuple[float, float]:
        """Seconds that forward and backward compute."""
        return self.forward - self.gathering[0], self.backward - self.gathering[1]

    @property
    def training_bytes(self) -> int:
        """Bytes of the model, gradients and momenta; activations are not known."""
        return (2 + self.momenta) * self.bytes + self.frozen

    def at_speed(self, speed: float) -> "ModelCost":
        """The same model on a machine that computes so many times as fast."""
        if speed == 1:
            return self
        forward, backward = self.forward / speed, self.backward / speed
        return replace(self, forward=forward, backward=backward, optimizer=self.optimizer / speed)

    def in_turns(self, turns: float) -> "ModelCost":
        """The same model where so many ranks take turns on each core; on an accelerator, only its optimizer does.

        >>> ModelCost(shapes={"w": (8,)}, forward=1, backward=2, optimizer=1, shares={"w": 1.0}).in_turns(2.0).computing
        8.0
        """
        slowed = self.at_speed(1 / turns)
        return slowed if self.on_cores else replace(self, optimizer=slowed.optimizer)

    def arrival(self, bucket: int) -> float:
        """The share of the backward pass that is done when a bucket, and all before it, are complete."""
        return self._arrivals[bucket]

    @cached_property
    def _arrivals(self) -> list[float]:
        return [*accumulate((max(self.shares[name] for name in names) for names in self.buckets), max)]

    def copies(self, bucket: int) -> float:
        """Bytes that are read and written to gather a bucket's gradients."""
        return float(self.width + self.wide) * self._lengths[bucket]

    @cached_property
    def _lengths(self) -> list[int]:
        return [sum(prod(self.shapes[name]) for name in names) for names in self.buckets]

    def of_dtype(self, dtype: str) -> "ModelCost":
        """The same model with parameters of another dtype, in the same seconds.

        >>> ModelCost(shapes={"w": (8,)}, forward=1, backward=2, optimizer=0, shares={"w": 1.0}).of_dtype("bf16").bytes
        16
        """
        require_dtype(dtype)
        return replace(self, dtype=dtype)


def require_dtype(dtype: str) -> None:
    """Raise CostError for a dtype in which no model is planned."""
    if dtype not in WIDTHS:
        raise CostError(f"there is no dtype called {dtype!r} for parameters here. {nearest(dtype, list(WIDTHS))}")


CONVOLUTION = 30  # times the multiplications of a linear layer for each parameter, as images go


def guessed_shares(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, float]:
    """Shares of the backward pass if gradients come in reverse order and each takes time in proportion to its parameters.

    >>> guessed_shares({"first": (3, 4), "second": (4,)})
    {'first': 1.0, 'second': 0.25}
    """
    costs = {name: prod(shape) * (CONVOLUTION if len(shape) == 4 else 1) for name, shape in shapes.items()}
    total, done, out = sum(costs.values()), 0, dict[str, float]()
    for name in reversed(list(shapes)):
        done += costs[name]
        out[name] = done / total
    return {name: out[name] for name in shapes}
