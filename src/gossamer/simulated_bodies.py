"""Virtual ranks whose models stay equal share one body: one model, and one optimizer that steps once for all of them."""

from torch import nn

from gossamer.recipe import Recipe


class StepTurns:
    """Who steps the optimizer of a body that so many ranks share: the first of them that comes to the step."""

    def __init__(self, ranks: int = 1) -> None:
        self._ranks, self._asked = ranks, 0

    def take(self) -> bool:
        """True if this rank steps; each rank asks once a step, and none a second time before all have asked."""
        self._asked += 1
        return self._asked % self._ranks == 1 % self._ranks


def stay_equal(recipe: Recipe, model: nn.Module) -> bool:
    """True if ranks differ in their batches, gradients and memories only, so that one model may stand for all.

    So it is where each step is that of the mean of this step's gradients, which no rank has before all have computed theirs.
    Buffers are each rank's own.

    >>> linear = nn.Linear(2, 2)
    >>> [stay_equal(Recipe.of(text), linear) for text in ("allreduce", "topk", "local_sgd(8)", "allreduce + delayed()", "sgp")]
    [True, True, False, False, False]
    >>> stay_equal(Recipe.of("allreduce"), nn.BatchNorm1d(2))
    False
    """
    differ = {"parts models", "adds momentum", "control"}
    return (
        recipe.schedule.shape.steps_alike
        and recipe.update is None
        and not any(differ & part.traits for part in recipe.parts())
        and next(model.buffers(), None) is None
    )
