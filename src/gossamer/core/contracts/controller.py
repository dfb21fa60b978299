"""How much, as training goes, and what may be looked at to say so."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.constraints import Constraint, requires, those
from gossamer.core.contracts.exchange import Exchange
from gossamer.core.parts import Part


class Facts(NamedTuple):
    """What a controller may look at: numbers that are bit-equal on every rank."""

    step: int
    lr: float
    blocks: Sequence[Bucket]  # this step's agreed mean gradients
    sums: Sequence[Tensor] = ()  # of each block, what `local` told of it, summed over all ranks; in double precision
    loss: float | None = None  # of this step's batches, the mean over the ranks that told it, for who `hears_loss`


class Controller(Part):
    """How much, as training goes: a pure function from facts and state to another recipe.

    Law: equal facts give equal recipes on all ranks; with equal levels it changes nothing, bit for bit.
    """

    kind: ClassVar[str] = "controller"

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(control=True, moves_schedule=self.moves_schedule)

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
