"""The contract of exchanges, which average buckets over ranks."""

from abc import abstractmethod
from typing import ClassVar

from gossamer.core.bucket import Bucket, Layout, State, entry_name
from gossamer.core.constraints import Constraint, requires, those
from gossamer.core.contracts.codec import AsItsCodec
from gossamer.core.contracts.context import Context, Policy, ReduceResult, Unit
from gossamer.core.contracts.lossy import Lossy
from gossamer.core.verbs import Program


class Exchange(Lossy):
    """Averages buckets over ranks, through messages between them.

    Law: all ranks get bit-equal means; the bytes in the ledger are the bytes handed to the backend.
    """

    kind: ClassVar[str] = "exchange"

    @property
    def traits(self) -> frozenset[str]:
        said = {"unbiased": self.unbiased, "contracts": self.contracts, "sparse": self.sparse, "votes": self.votes}
        said |= {"bounds_residual": self.bounds_residual, "own_size": self.own_size}
        return those(whole=self.whole, exact=self.exact, **said)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        if not self.needs_feedback:
            return ()
        if self.contracts or self.bounds_residual:
            because = (
                "{exchange} is biased, and without error feedback training need not converge; "
                "use '{exchange} + error_feedback()', or none(allow_biased=True) to insist"
            )
        else:
            because = (
                "{exchange} is biased, so that training need not converge, and error feedback around it can diverge; "
                "use another codec, such as ternary() or qsgd(), or '+ none(allow_biased=True)' to insist"
            )
        return (requires("mends bias", "bias allowed", because=because),)

    @property
    def owes(self) -> bool:
        """True if it keeps a residual that only itself can apply, and no memory can take over."""
        return False

    @property
    def encodes_mean(self) -> bool:
        """True if the mean is encoded too, before it is sent to all ranks."""
        return False

    @property
    def adds_up(self) -> bool:
        """True if it sends only all-reduced sums, which may be formed group by group."""
        return False

    def least_blocks(self, size: int) -> int:
        """The minimum number of buckets for a model among `size` ranks, if they are of some megabytes and the recipe does
        not say otherwise: the first of them travel while backward computes the last.
        """
        return 1

    @abstractmethod
    def omega(self, layout: Layout, size: int) -> float:
        """The relative variance among `size` ranks: sum of E|sent - x|^2 <= omega * sum of |x|^2, both over
        ranks; inf where it is biased.
        """

    def policy(self, key: str) -> Policy:
        return "mean"

    def unit(self, key: str) -> Unit:
        return "none"

    def owned(self, state: State) -> list[str]:
        """The keys of the entries that chunk owners keep."""
        return [key for key in state if self.policy(entry_name(key)) == "owner"]

    @abstractmethod
    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]: ...


class CodecExchange(AsItsCodec, Exchange):
    """An exchange that uses one codec."""

    def omega(self, layout: Layout, size: int) -> float:
        return self.codec.omega(layout)  # a bound for each rank also bounds their sum


class LosslessExchange(Exchange):
    """An exchange that sends numbers uncompressed, without a codec."""

    @property
    def unbiased(self) -> bool:
        return True

    def omega(self, layout: Layout, size: int) -> float:
        return 0.0
