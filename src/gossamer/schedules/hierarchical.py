"""Hierarchical local SGD: neighbours average often, where links are fast, and all ranks now and then."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, final

from gossamer.codecs import FP32
from gossamer.core.bucket import Bucket, State
from gossamer.core.constraints import Constraint, excludes
from gossamer.core.contracts import Context, ReduceResult
from gossamer.core.groups import within
from gossamer.core.loop import Loop
from gossamer.core.lossless import LosslessExchange
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice
from gossamer.core.schedule import Schedule
from gossamer.core.step_phases import after_optimizer_step, until_optimizer_step
from gossamer.core.verbs import OptimizerStep, Program
from gossamer.exchanges import AllReduced
from gossamer.exchanges.as_one import Node
from gossamer.schedules.wrapping import Wrapping

_DENSE = AllReduced(FP32())


@final
@part("hierarchical", sample="hierarchical(2, 2, local_sgd(4))")
class Hierarchical(Wrapping):
    """Every `near` steps, models of `ranks` neighbours are averaged densely; all ranks meet as `then` says.

    x_i = mean over i's group of x_j, after the optimizer's step and before whatever `then` does at it; each counts as much as its
    data do (`attach(weight=)`). Where `then` ends a
    round only it averages, for the mean of all needs no means of groups. Groups are of consecutive ranks; the last may be
    smaller, and counts rank by rank. `then` may be any schedule of local steps, this one too: three levels are
    hierarchical(2, 8, hierarchical(8, 64, local_sgd(32))).

    The averages inside pass neither codec nor memory; those of all ranks pass both. A model that is not finite spoils its
    group until the end of the round, which is dropped: then all ranks return to the anchor.

    Use: several ranks behind one slow link, which see each other often for little.

    Not for: ranks whose links are all alike: a shorter round of all of them does more for as many bytes.

    Wire: dense, among the group, once per `near` steps; and what `then` sends.

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
        require(
            not self.then.averages_gradients and self.then.drives is None and not self.then.mixes,
            f"hierarchical: under {self.then} ranks meet at every step, or hold shares that an average of a few would break; "
            "use local_sgd(...), slowmo(...) or another schedule of local steps",
        )
        require(
            not self.then.skips_steps,
            f"hierarchical: under {self.then} neighbours are at steps of their own between the ends of rounds, and would wait for one "
            "another for ever; take the rounds without by_speed",
        )

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        because = (
            "{controller} under {schedule}: models of a group move in between, and it sees nothing of that; drop it"
        )
        return (*self.then.constraints, excludes("control", because=because))

    @property
    def prelude(self) -> int:
        return self.then.prelude

    @property
    def ranks_per_node(self) -> int:
        return max(self.ranks, super().ranks_per_node)

    def groups(self, size: int) -> tuple[tuple[int, ...], ...]:
        nodes = [Node.of(first, size, self.ranks).ranks for first in range(0, size, self.ranks)]
        return tuple(dict.fromkeys([*(node for node in nodes if len(node) > 1), *super().groups(size)]))

    def ends_round(self, step: int) -> bool:
        return self.then.ends_round(step)

    def is_synced(self, step: int) -> bool:
        return self.then.is_synced(step)

    def step(self, loop: Loop) -> Program[None]:
        steps = self.then.step(loop)
        yield from until_optimizer_step(steps)
        descended = yield OptimizerStep()
        if self._meets(loop.step) and min(loop.size, self.ranks) > 1:
            yield from self._average_inside(loop)
        yield from after_optimizer_step(steps, descended)

    def _meets(self, step: int) -> bool:
        """Whether a group averages after a step: not where more ranks do."""
        more = step % self.then.period == 0 or self.then.is_synced(step)
        return (
            step % self.near == 0 and not more and not (isinstance(self.then, Hierarchical) and self.then._meets(step))
        )

    def _average_inside(self, loop: Loop) -> Program[None]:
        values, counts = loop.parameters(), self._counts(loop)
        if counts is None:
            return
        given = values if counts == 1 else [value.mul_(counts) for value in values]
        loop.write((yield from loop.local_average(given, _Inside(self.ranks))))

    def _counts(self, loop: Loop) -> float | None:
        """What this rank counts where its group's count 1 on average; None where none of them counts anything."""
        if not loop.weights:
            return 1.0
        group = [loop.weights[rank] for rank in Node.of(loop.rank, loop.size, self.ranks).ranks]
        return len(group) * loop.weight / sum(group) if sum(group) else None


@dataclass(frozen=True, repr=False)
class _Inside(LosslessExchange):
    """A dense average of consecutive ranks."""

    name: ClassVar[str] = "inside"

    ranks: int

    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        node = Node.of(context.rank, context.size, self.ranks)
        place = context._replace(rank=node.place, size=len(node.ranks))
        return (yield from within(_DENSE.average(block, state, place), node.ranks))
