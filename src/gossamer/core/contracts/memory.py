"""What is kept of what did not get through."""

from abc import abstractmethod
from typing import ClassVar, Protocol

from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.constraints import those
from gossamer.core.contracts.context import Context, ReduceResult
from gossamer.core.contracts.entries import Policy, Unit
from gossamer.core.parts import Part
from gossamer.core.verbs import Program


class Sender(Protocol):
    """The rest of the way: what a memory hands its block to."""

    def __call__(self, block: Bucket, context: Context) -> Program[ReduceResult]: ...


UNBALANCED = (
    "{memory} over {exchange}: the second encoding's error follows the memory's own rate, or their books would not balance; "
    "leave feedback out"
)
"""Why a memory bars an exchange that was told what to do with the error of a second encoding."""


class Memory(Part):
    """Middleware around an exchange; it keeps what did not get through. Stacks like an onion.

    Law: with error feedback, the sum of all means plus the mean residual equals the sum of all mean inputs. State is
    assigned, never written into, so that a skipped step leaves no trace.
    """

    kind: ClassVar[str] = "memory"

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(memory=True, parts_models=self.parts_models)

    @property
    def hands_on(self) -> bool:
        """True if `around` returns the mean as the exchange gave it."""
        return False

    @property
    def begins(self) -> bool:
        """True if what it sends first is of another kind than all that comes after."""
        return False

    @property
    def parts_models(self) -> bool:
        """True if `around` returns what only this rank steps with, so that models part."""
        return False

    @property
    def gain(self) -> float:
        """How many times a mean that stays comes out in the end: more than once, if the memory has momentum."""
        return 1.0

    def policy(self, key: str) -> Policy:
        return "mean"

    def unit(self, key: str) -> Unit:
        return "gradient"

    def follow(self, omega: float) -> float:
        """The rate at which this memory follows what was sent, given the exchange's relative variance; 0: it does not."""
        return 0.0

    def residual(self, state: State) -> tuple[Tensor, float] | None:
        """What did not get through of this rank's own, and the units it is in; None if that is not kept."""
        return None

    def inherit(self, state: State, owed: Tensor, times: float) -> bool:
        """Take over so many times what is owed to this rank's blocks, in the units of the state; False if nothing is kept."""
        return False

    @abstractmethod
    def around(self, block: Bucket, state: State, send: Sender, context: Context) -> Program[Tensor]: ...
