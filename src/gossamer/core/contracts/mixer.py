"""The contract of mixers, which average models with peers, so that they never agree exactly."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor

from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts.context import Context, Policy
from gossamer.core.parts import Part
from gossamer.core.verbs import Program

Report = Callable[[int | None, "bool | Tensor"], "bool | Tensor"]
"""Hears which rank it is about (None: this one), and whether its model is finite; a device has not said yet what a tensor is.
Returns what holds of the whole model, of which this rank may hold a shard.
"""


class Mixer(Part):
    """Mixes the model with those of peers, as in gossip; the part that a schedule which mixes is made of.

    `push` takes the model a rank holds and returns a program that sends and receives; `absorb` takes the wires received
    (none, perhaps, after a local step: a rank then holds less than its share) and gives the model that the rank holds.
    `wrote` then gets the model as stored in the parameters: the same tensor, unless they have fewer bits than the bucket.
    What was pushed is absorbed before the next push. `follow` does as `absorb` and `wrote` do, and writes the model, piece by
    piece where the parameters lie: a mixer that passes over a model often saves most of the way to memory by it.

    A model that is not finite neither gives nor is merged (`heal`): who gets one takes its own in that one's place, with its
    weight; whose own is not takes what came.

    Law: the sum of all numerators, those in flight included, and the sum of all weights, never change but by what the
    optimizers do, whatever the parameters' precision.
    """

    kind: ClassVar[str] = "mixer"
    # It remembers nothing of its peers, so that it can begin anew from equal models at any time.
    forgets: ClassVar[bool] = False

    @property
    def begins(self) -> bool:
        """True if its first messages are of another kind than all later ones."""
        return False

    @property
    def prelude(self) -> int:
        """The number of rounds before its peers repeat."""
        return 0

    def policy(self, key: str) -> Policy:
        return "drop"

    @abstractmethod
    def numerator(self, block: Bucket, state: State) -> Tensor:
        """The conserved quantity: its sum over all ranks does not change by mixing; `block` is the model."""

    @abstractmethod
    def push(self, block: Bucket, state: State, context: Context, round: int) -> Program[list[Tensor]]: ...

    def heal(
        self, block: Bucket, state: State, arrived: Sequence[Tensor], report: Report
    ) -> tuple[Bucket, Sequence[Tensor]]:
        """What `absorb` is given, without what is not finite: `report` hears of every rank whether its model is."""
        return block, arrived

    @abstractmethod
    def absorb(self, block: Bucket, state: State, arrived: Sequence[Tensor]) -> Tensor: ...

    @abstractmethod
    def wrote(self, block: Bucket, state: State) -> None: ...

    def follow(
        self, pieces: Callable[[], Sequence[Tensor]], layout: Layout, state: State, arrived: Sequence[Tensor]
    ) -> Sequence[Tensor] | None:
        """Mix straight into the parameters, given one after the other by `pieces`. Returns the model, if it is now in one piece as well;
        None, with nothing changed, where this is not possible.
        """
        return None
