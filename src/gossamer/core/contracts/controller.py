"""How much, as training goes, and what may be looked at to say so."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.constraints import Constraint, requires, those
from gossamer.core.contracts.exchange import Exchange
from gossamer.core.parts import Part


class ParamGroup(NamedTuple):
    """A parameter group of the optimizer: its learning rate, and the parameters of the model that it has."""

    lr: float
    names: Sequence[str]
    numel: int  # elements of all of them


class Facts(NamedTuple):
    """What a controller may look at: numbers that are bit-equal on every rank."""

    step: int
    lr: float  # the largest learning rate of all parameter groups
    blocks: Sequence[Bucket]  # this step's agreed mean gradients
    sums: Sequence[Tensor] = ()  # of each block, what `local` told of it, summed over all ranks; in double precision
    loss: float | None = None  # of this step's batches, the mean over the ranks that told it, for who `hears_loss`
    groups: Sequence[ParamGroup] = ()  # the optimizer's, in its order; none: all parameters have one rate

    @property
    def param_groups(self) -> Sequence[ParamGroup]:
        """The optimizer's parameter groups; at least one."""
        segments = [] if self.groups else [s for block in self.blocks for s in block.layout.segments]
        return self.groups or (ParamGroup(self.lr, [s.name for s in segments], sum(s.numel for s in segments)),)

    @property
    def mean_lr(self) -> float:
        """The mean learning rate of all elements: what noise costs that every element adds, each at its own rate."""
        groups = self.param_groups
        rates, numel = {g.lr for g in groups}, sum(g.numel for g in groups)
        if len(rates) == 1 or not numel:  # without a rounding where there is one rate
            return self.lr
        return sum(g.lr * g.numel for g in groups) / numel


class Controller(Part):
    """How much, as training goes: a pure function from facts and state to another recipe.

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
        because = "{controller} counts what ranks' own gradients tell as they leave, and under {schedule} none do; use every_step()"
        return (requires("averages gradients", because=because),)

    @property
    def moves_schedule(self) -> bool:
        """True if it may change the schedule, and so what the optimizer does; else only what is sent."""
        return False

    @property
    def hears_rate(self) -> bool:
        """False if it never looks at learning rates; a host that does not know them refuses all others."""
        return True

    @property
    def hears_loss(self) -> bool:
        """True if it goes by the loss that the training loop tells, where averages of models land."""
        return False

    @property
    def cuts(self) -> bool:
        """True if parameters that it sends another way travel apart from the rest. Else they stay in their block, whose codec
        is told which of its parameters are written otherwise (`Layout.knobs`): other choices then cost nothing.
        """
        return True

    @property
    def counts(self) -> int:
        """How many numbers `local` tells of a block; with 0 nothing is computed, and nothing sent."""
        return 0

    @property
    def counts_each(self) -> bool:
        """True if so many numbers are told of each parameter of a block."""
        return False

    def local(self, block: Bucket, exchange: Exchange) -> Tensor:
        """What this rank tells of its own gradient, free of the loss scale, as it leaves over this exchange: so many numbers
        (for each parameter, in their order). All ranks' are summed, in one small all-reduce a step, and come as `Facts.sums`.
        """
        raise NotImplementedError(f"{self} counts {self.counts} number(s) of a block, and does not say which")

    def reach(self, recipe: Any) -> Iterable[Any]:
        """What it may put in force under this recipe, without itself; all of it is checked when the recipe is made."""
        return ()

    @abstractmethod
    def decide(self, facts: Facts, recipe: Any, state: State) -> Any: ...
