"""The context that parts get at each step, the result of an exchange, and what becomes of entries of their state."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from gossamer.core.rng import CounterRng


class Context(NamedTuple):
    """The rank, world size, step and random numbers of a call, and settings that a memory and an exchange pass each other."""

    rank: int
    size: int
    step: int
    rng: CounterRng
    rescale: float = 1.0  # the factor on an exchange's own state, after the memory's units have changed
    lr: float = 1.0  # the learning rate of the bucket's parameters at this step
    # The rate at which a memory around the exchange follows the sent values; 0: there is no such memory.
    shift: float = 0.0
    # The share of its second encoding's error that an exchange adds later; None: no memory sets it.
    feedback: float | None = None
    scale: float = 1.0  # the loss scaler's factor, by which gradients are multiplied
    # This step's mean is compressed and others are not: do not estimate a gradient's size from it.
    is_compressed: bool = False
    own: bool = False  # the gradient is this rank's own: there is no agreed mean at this step


@dataclass(frozen=True, eq=False)
class ReduceResult:
    """The result of an exchange: the agreed mean and, on demand, the part of this rank's input that was sent.

    The receiver owns the mean and may write to it. `largest`, where an exchange found it without another pass, is one
    number that no element of the mean exceeds in magnitude, and that is finite if and only if they all are. `drained` says that
    the sent part is already subtracted from the bucket, which had `drains` set.
    """

    mean: Tensor
    add_sent: Callable[[Tensor, float], None]  # into += weight * (the sent part of this rank's input)
    largest: Tensor | None = None
    drained: bool = False


Policy = Literal["equal", "mean", "owner", "shard", "drop"]
"""How a state entry is loaded into a world of another size. It is equal on all ranks; every new rank gets the mean
of the old ranks' entries; each element is kept by the owner of its chunk, in an entry as long as the bucket ("owner") or as
the chunk ("shard"); or it starts anew."""

Unit = Literal["gradient", "none"]
"""The unit of a state entry: that of gradients, which a loss scaler multiplies, or another. The worker
rescales the former when the loss scale changes, so that parts need not handle it."""
