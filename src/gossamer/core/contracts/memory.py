"""The contract of memories, which keep the residual: the part of the gradient that was not sent."""

from abc import abstractmethod
from typing import ClassVar, Protocol

from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.constraints import those
from gossamer.core.contracts.context import Context, Policy, ReduceResult, Unit
from gossamer.core.parts import Part
from gossamer.core.verbs import Program


class Sender(Protocol):
    """The function that a memory passes its bucket to: the rest of the exchange."""

    def __call__(self, block: Bucket, context: Context) -> Program[ReduceResult]: ...


ARREARS = "arrears"
"""The entry for the residual of a memory that was replaced; the next average adds it."""

UNBALANCED = (
    "{memory} over {exchange}: the second encoding's error must follow the memory's own rate, or the residuals would be wrong; "
    "leave feedback out"
)
"""Why a memory excludes an exchange with its own `feedback` setting for the second encoding's error."""


class Memory(Part):
    """Wraps an exchange and keeps the residual: the part that was not sent. Memories can be nested.

    Law: with error feedback, the sum of all means plus the mean residual equals the sum of all mean inputs. State is
    assigned, never written into, so that a skipped step leaves no trace.
    """

    kind: ClassVar[str] = "memory"
    hands_on: ClassVar[bool] = False  # `around` returns the exchange's mean unchanged
    owes: ClassVar[bool] = False  # it keeps a residual: input values that were not sent yet

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(memory=True, parts_models=self.parts_models)

    @property
    def begins(self) -> bool:
        """True if its first messages are of another kind than all later ones."""
        return False

    @property
    def parts_models(self) -> bool:
        """True if `around` returns a gradient of this rank only, so that models diverge."""
        return False

    @property
    def gain(self) -> float:
        """The total gain on a constant mean: above 1 if the memory has momentum."""
        return 1.0

    def policy(self, key: str) -> Policy:
        return "mean"

    def unit(self, key: str) -> Unit:
        return "gradient"

    def follow(self, omega: float) -> float:
        """The rate at which this memory follows the sent values, given the exchange's relative variance; 0: it does not."""
        return 0.0

    def residual(self, state: State) -> tuple[Tensor, float] | None:
        """This rank's residual and the factor of its units; None if it is not kept."""
        return None

    def inherit(self, state: State, owed: Tensor, times: float) -> bool:
        """Add `times` the residual `owed` to the state, in the state's units; False if this memory keeps no residual."""
        return False

    def owing(self, state: State) -> State:
        """What this rank was given and has not sent, by entry, in units of the gradient: a rank that leaves hands it to the others."""
        debt = self.residual(state)
        return {} if debt is None else {"residual": debt[0] / debt[1]}

    def take_on(self, state: State, owed: State, times: float) -> None:
        """Add `times` what another rank owed to what this one owes."""
        if "residual" in owed:
            self.inherit(state, owed["residual"], times)

    def let_go(self, state: State) -> None:
        """Forget what others have taken on."""

    def succeed(self, before: "Memory", state: State) -> State:
        """The initial state when it replaces a memory that kept `state`: all of that if it is of the same kind, else the
        residual, which the next average adds.
        """
        if type(before) is type(self):
            return dict(state)
        arrears, debt = state.get(ARREARS), before.residual(state)
        if debt is None:
            return {} if arrears is None else {ARREARS: arrears}
        return {ARREARS: debt[0] if arrears is None else debt[0] + arrears}

    def renew(self, state: State, size: int) -> Program[None]:
        """Agree again on entries that are equal on all ranks, after ranks were lost or have come; `size` ranks are present."""
        yield from ()

    def join(self, state: State) -> State:
        """The state with which a rank joins others at work, given their equal entries."""
        return state

    @abstractmethod
    def around(self, block: Bucket, state: State, send: Sender, context: Context) -> Program[Tensor]: ...
