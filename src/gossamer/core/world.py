"""The world that a recipe is bound to."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from gossamer.core.block import Layout

if TYPE_CHECKING:
    from torch.optim import Optimizer


class World(NamedTuple):
    """What a recipe meets when it is bound: how many ranks there are, the blocks of the model, and who steps it.

    On paper nobody does. Whoever hosts it has terms of his own, which are judged with those of the parts.
    """

    size: int
    layouts: Sequence[Layout]
    optimizers: "Sequence[Optimizer]" = ()

    @property
    def trains_alone(self) -> bool:
        """One rank, which trains plainly: nothing is sent."""
        return self.size == 1 and bool(self.optimizers)
