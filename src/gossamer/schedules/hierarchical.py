"""Hierarchical local SGD: groups with fast links average often, and all ranks average seldom."""

from typing import Annotated, final

from gossamer.core.constraints import Constraint, excludes
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice
from gossamer.core.schedule import Schedule
from gossamer.core.step_phases import after_optimizer_step, until_optimizer_step
from gossamer.core.verbs import OptimizerStep, Program
from gossamer.exchanges.as_one import Node
from gossamer.schedules.nodes import Inside
from gossamer.schedules.wrapping import Wrapping


@final
@part("hierarchical", sample="hierarchical(2, 2, local_sgd(4))")
class Hierarchical(Wrapping):
    """Averages models densely in groups of `ranks` every `near` steps, and over all ranks as `then` does.

    x_i = mean over i's group of x_j, after the optimizer's step and before `then` acts; weighted by the ranks' data
    (`attach(weight=)`). Where `then` ends a round, only `then` averages. Groups are consecutive ranks; the last group may be
    smaller, and each of its ranks still counts as one rank. `then` may be any schedule of local steps, also this one: three
    levels are hierarchical(2, 8, hierarchical(8, 64, local_sgd(32))).

    Averages inside a group use neither codec nor memory; those of all ranks use both. If a model is not finite, its group's
    models are not either, until the end of the round: then the round is dropped, and all ranks return to the anchor.

    Use: several ranks behind one slow link, with fast links among them.

    Not for: ranks with equal links, where a shorter round of all ranks does more for as many bytes.

    Wire: a dense average inside the group once per `near` steps, and the bytes of `then`.

    >>> from gossamer.schedules import LocalSGD
    >>> Hierarchical(near=2, ranks=8, then=LocalSGD(16))
    hierarchical(2, 8, local_sgd(16))

    Paper: Lin, Stich, Patel, Jaggi, Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020.
    """

    near: Annotated[int, Choice(1, 2, 4)]
    ranks: int
    then: Schedule

    def __post_init__(self) -> None:
        require(self.near >= 1, f"hierarchical: near must be at least 1 step, got {self.near}")
        require(self.ranks >= 1, f"hierarchical: a group has at least 1 rank, got ranks={self.ranks}")
        then = self.then.shape
        require(
            not (then.averages_gradients or then.mixer or then.mixes or then.serves),
            f"hierarchical: {self.then} averages at every step, or keeps state that an average inside a group would break; "
            "use local_sgd(...), slowmo(...) or another schedule of local steps",
        )
        require(
            not then.skips_steps,
            f"hierarchical: under {self.then} ranks of a group are at different steps within a round, and would wait for each "
            "other for ever; use the rounds without by_speed",
        )

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        because = "{controller} under {schedule}: averages inside a group change models, and the controller does not see that; drop it"
        return (*self.then.constraints, excludes("control", because=because))

    @property
    def ranks_per_node(self) -> int:
        return max(self.ranks, super().ranks_per_node)

    def groups(self, size: int) -> tuple[tuple[int, ...], ...]:
        nodes = [Node.of(first, size, self.ranks).ranks for first in range(0, size, self.ranks)]
        return tuple(dict.fromkeys([*(node for node in nodes if len(node) > 1), *super().groups(size)]))

    def step(self, loop: Loop) -> Program[None]:
        steps = self.then.step(loop)
        yield from until_optimizer_step(steps)
        stepped = yield OptimizerStep()
        if self._meets(loop.step) and min(loop.ranks.size, self.ranks) > 1:
            yield from self._average_inside(loop)
        yield from after_optimizer_step(steps, stepped)

    def _meets(self, step: int) -> bool:
        """True if groups average after a step; False where a larger group or all ranks do."""
        if step % self.near or step % self.then.shape.period == 0 or self.then.is_synced(step):
            return False
        return not (isinstance(self.then, Hierarchical) and self.then._meets(step))

    def _average_inside(self, loop: Loop) -> Program[None]:
        values, counts = loop.parameters(), self._counts(loop)
        if counts is None:
            return
        weighted = values if counts == 1 else [value.mul_(counts) for value in values]
        loop.write((yield from loop.averages.local(weighted, Inside(self.ranks))))

    def _counts(self, loop: Loop) -> float | None:
        """Return this rank's weight, scaled so that its group's mean weight is 1; None if all weights of the group are 0."""
        if not loop.ranks.weights:
            return 1.0
        group = [loop.ranks.weights[rank] for rank in Node.of(loop.ranks.rank, loop.ranks.size, self.ranks).ranks]
        return len(group) * loop.ranks.weight / sum(group) if sum(group) else None
