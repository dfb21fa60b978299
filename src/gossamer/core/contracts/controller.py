"""The contract of controllers, which change the recipe during training, and the facts that they decide by."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.constraints import Constraint, requires, those
from gossamer.core.contracts.exchange import Exchange
from gossamer.core.contracts.times import RankTimes, TimesDue
from gossamer.core.parts import Part


class ParamGroup(NamedTuple):
    """A parameter group of the optimizer: its learning rate and its parameters."""

    lr: float
    names: Sequence[str]
    numel: int  # elements of all of them


class Facts(NamedTuple):
    """The inputs of a controller's decision: numbers that are bit-equal on every rank."""

    step: int
    lr: float  # the largest learning rate of all parameter groups
    blocks: Sequence[Bucket]  # this step's agreed mean gradients
    sums: Sequence[Tensor] = ()  # for each bucket, the result of `local` summed over all ranks, in double precision
    loss: float | None = None  # mean loss of this step over the ranks that reported it, if the controller `hears_loss`
    # The optimizer's groups, in its order; none: all parameters have one rate.
    groups: Callable[[], Sequence[ParamGroup]] = tuple
    # Sums numbers of shards; None: blocks are whole.
    over_shards: Callable[[Sequence[float]], list[float]] | None = None
    times: Sequence[RankTimes] = ()  # of all ranks, at the steps at which `due` asks for them
    # Only a controller that `hears_times` is asked where the means are not finite; it is given no blocks then.
    finite: bool = True
    size: int = 1  # ranks
    shapes: Mapping[str, tuple[int, ...]] = {}  # of whole parameters, of which blocks may hold shards
    # The elements of each block as another recipe would cut them; None: as they are.
    sizes_under: Callable[[Any], list[int]] | None = None
    tell: Callable[[str], object] = str  # says a decision in words: on all ranks in the ledger, once

    @property
    def param_groups(self) -> Sequence[ParamGroup]:
        """The optimizer's parameter groups; at least one."""
        groups = self.groups()
        segments = [] if groups else [s for block in self.blocks for s in block.layout.segments]
        return groups or (ParamGroup(self.lr, [s.name for s in segments], sum(s.numel for s in segments)),)

    @property
    def mean_lr(self) -> float:
        """The mean learning rate over all elements, by which noise in each element enters the model."""
        groups = self.param_groups
        rates, numel = {g.lr for g in groups}, sum(g.numel for g in groups)
        if len(rates) == 1 or not numel:  # avoids rounding where there is one rate
            return self.lr
        return sum(g.lr * g.numel for g in groups) / numel


class Controller(Part):
    """Changes the recipe during training: a pure function from facts and state to another recipe.

    Law: equal facts give equal recipes on all ranks; with equal levels it changes nothing, bit for bit.
    """

    kind: ClassVar[str] = "controller"

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(control=True, moves_schedule=self.moves_schedule, hears_rate=self.hears_rate)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        if not self.counts:
            return ()
        because = "{controller} needs statistics of each rank's gradients, and {schedule} sends no gradients; use every_step()"
        return (requires("averages gradients", because=because),)

    @property
    def moves_schedule(self) -> bool:
        """True if it may change the schedule, and so the optimizer's steps; else it changes only what is sent."""
        return False

    @property
    def hears_rate(self) -> bool:
        """False if it never reads learning rates; integrations that do not know them refuse all others."""
        return True

    @property
    def hears_loss(self) -> bool:
        """True if it uses the loss that the training loop reports, at steps where averages of models are taken."""
        return False

    @property
    def hears_times(self) -> bool:
        """True if it decides by what ranks measure of their steps: it is asked where means are not finite too, and reads none of them."""
        return False

    @property
    def read_hash(self) -> str:
        """A hash of what it has read from files, whose names in a recipe are equal on all ranks, and whose contents may not be."""
        return ""

    def due(self, step: int, recipe: Any, state: State) -> TimesDue:
        """What ranks measure at this step, and whether they exchange it; the same on all ranks."""
        return TimesDue()

    @property
    def cuts(self) -> bool:
        """True if parameters that it reroutes get buckets of their own. Else they stay in their bucket, whose codec
        is told which of its parameters are written otherwise (`Layout.knobs`): other choices then cost nothing.
        """
        return True

    @property
    def counts(self) -> int:
        """The length of the result of `local` for a bucket; with 0 nothing is computed or sent."""
        return 0

    @property
    def counts_each(self) -> bool:
        """True if `local` gives `counts` numbers for each parameter of a bucket."""
        return False

    def local(self, block: Bucket, exchange: Exchange) -> Tensor:
        """Statistics of this rank's own unscaled gradient before it is sent over this exchange: `counts` numbers
        (for each parameter, in their order). All ranks' are summed, in one small all-reduce a step, and come as `Facts.sums`.
        """
        raise NotImplementedError(f"{self} sets counts={self.counts} and does not define `local`; override it")

    def bound(self, shapes: Mapping[str, tuple[int, ...]]) -> "Controller":
        """The same controller for a model of these parameters."""
        return self

    def reach(self, recipe: Any) -> Iterable[Any]:
        """All recipes that it may change this recipe to, without the controller; they are checked when the recipe is made."""
        return ()

    def neighbours(self, recipe: Any, reached: Sequence[Any]) -> list[list[Any]]:
        """Groups of this recipe and those that `reach` yields: it changes between any two of a group, and between no others."""
        return [[recipe, *reached]]

    @abstractmethod
    def decide(self, facts: Facts, recipe: Any, state: State) -> Any: ...
