"""What parts are told at each step, and what comes out of an exchange."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from gossamer.core.rng import CounterRng


class Context(NamedTuple):
    """Where I sit: my rank, the size of the world, the step, and my dice; and what a memory and an exchange tell each other."""

    rank: int
    size: int
    step: int
    rng: CounterRng
    rescale: float = 1.0  # what an exchange keeps counts so many times now: the memory's own units have changed
    lr: float = 1.0  # the learning rate the block's parameters will be stepped with
    shift: float = 0.0  # the rate at which a memory around the exchange follows what was sent; 0: there is none
    feedback: float | None = None  # how much of what it leaves out an exchange shall add later; None: no memory says
    scale: float = 1.0  # what gradients come multiplied by, for who compares them with a number: a loss scaler's factor
    is_compressed: bool = (
        False  # this step's mean was written coarsely, and others are not: nobody learns a gradient's size of it
    )
    own: bool = False  # what comes is this rank's own gradient: no mean was agreed on at this step


@dataclass(frozen=True, eq=False)
class ReduceResult:
    """The outcome of an exchange: what all ranks agreed on, and, on demand, what got through of mine.

    The mean belongs to whoever gets it, who may write to it. `largest`, where an exchange has found it on its way, is one
    number that no element of the mean exceeds in magnitude, and that is finite if and only if they all are. `drained` says that
    what got through of mine is taken out of the block already, which had asked for that.
    """

    mean: Tensor
    add_sent: Callable[[Tensor, float], None]  # into += weight * (what got through of mine)
    largest: Tensor | None = None
    drained: bool = False
