"""Who talks to whom, to agree on an average."""

from abc import abstractmethod
from typing import ClassVar

from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.constraints import Constraint, requires, those
from gossamer.core.contracts.codec import AsItsCodec
from gossamer.core.contracts.context import Context, ReduceResult
from gossamer.core.contracts.entries import Policy, Unit
from gossamer.core.contracts.lossy import Lossy
from gossamer.core.verbs import Program


class Exchange(Lossy):
    """Who talks to whom, to agree on an average.

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
    @abstractmethod
    def needs_feedback(self) -> bool: ...

    @property
    @abstractmethod
    def contracts(self) -> bool: ...

    @property
    def bounds_residual(self) -> bool:
        """True if what error feedback around it holds back stays bounded, although it does not contract."""
        return False

    @property
    def sum_rounding(self) -> float:
        """How much of a number each addition may round off on its way, for nobody to keep."""
        return 0.0

    @property
    def encodes_mean(self) -> bool:
        """True if the mean is written by the codec too, on its way to everybody."""
        return False

    @property
    def adds_up(self) -> bool:
        """True if what it sends are sums on their way, all-reduces that is: they may be formed group by group."""
        return False

    @property
    def bucket_mb(self) -> float:
        """How many megabytes of gradient to put in one block, unless the recipe says otherwise; measured."""
        return 25.0

    def least_blocks(self, size: int) -> int:
        """Into how many blocks at least to cut a model among `size` ranks, if they are of some megabytes and the recipe does
        not say otherwise: the first of them travel while backward computes the last.
        """
        return 1

    @abstractmethod
    def omega(self, layout: Layout, size: int) -> float:
        """The relative variance among `size` ranks: sum of E|what got through - x|^2 <= omega * sum of |x|^2, both over
        ranks; inf where it is biased.
        """

    def policy(self, key: str) -> Policy:
        return "mean"

    def unit(self, key: str) -> Unit:
        return "none"

    @abstractmethod
    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]: ...


class CodecExchange(AsItsCodec, Exchange):
    """An exchange of what one codec writes."""

    def omega(self, layout: Layout, size: int) -> float:
        return self.codec.omega(layout)  # a bound for each rank is one for their sum
