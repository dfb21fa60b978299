"""The world that a recipe is bound to."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gossamer.core.bucket import Layout
from gossamer.core.errors import AttachError

if TYPE_CHECKING:
    from torch.optim import Optimizer


class Binding(NamedTuple):
    """What a recipe meets when it is bound: how many ranks there are, the blocks of the model, and who steps it.

    On paper nobody does. Whoever hosts it has terms of his own, which are judged with those of the parts.
    """

    size: int
    layouts: Sequence[Layout]
    optimizers: "Sequence[Optimizer]" = ()
    traits: frozenset[str] = frozenset()  # what the recipe's parts promise, all of them together

    @property
    def trains_alone(self) -> bool:
        """One rank, which trains plainly: nothing is sent."""
        return self.size == 1 and bool(self.optimizers)

    def refuse_momentum(self, part: object, momentum: float, without: str = "momentum=0.0 in the recipe") -> None:
        """Refuse an optimizer with momentum where a part brings some: it would be added twice."""
        for optimizer in self.optimizers if momentum else ():
            if any(map(_has_momentum, optimizer.param_groups)):
                raise AttachError(
                    f"{part} with {type(optimizer).__name__}: both add momentum, so that steps would be many times as long as "
                    f"either makes them; use torch.optim.SGD with momentum=0, or leave it to the optimizer: {without}"
                )


def _has_momentum(group: Mapping[str, Any]) -> bool:
    """Whether an optimizer's parameter group has momentum, that of Adam and its like included."""
    return group.get("momentum", 0) != 0 or next(iter(group.get("betas", (0,)))) != 0
