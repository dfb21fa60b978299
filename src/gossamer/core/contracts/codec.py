"""How a block is written: alone, for anyone to read, or as messages that add up."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts.context import Context, ReduceResult
from gossamer.core.contracts.entries import Policy
from gossamer.core.contracts.lossy import Lossy
from gossamer.core.verbs import Program


class _Encoding(Lossy):
    """What codecs promise, whether they write alone or together."""

    kind: ClassVar[str] = "codec"

    @abstractmethod
    def omega(self, layout: Layout) -> float:
        """E|decode - x|^2 <= omega |x|^2 for an unbiased codec; inf for a biased one."""

    @property
    def needs_feedback(self) -> bool:
        """True if training need not converge without error feedback around this codec."""
        return not self.unbiased

    @property
    def contracts(self) -> bool:
        """True if E|x - decode|^2 < |x|^2, so that error feedback around it is stable."""
        return True

    @property
    def bounds_residual(self) -> bool:
        """True if what error feedback around it holds back stays bounded, although it does not contract."""
        return False

    @property
    @abstractmethod
    def bucket_mb(self) -> float:
        """How many megabytes of gradient to put in one block, unless the recipe says otherwise; measured."""


class Codec(_Encoding):
    """I write alone, anyone can read.

    `encode` turns a block into one wire; `accumulate` adds `weight` times what a wire says to a flat tensor.
    `wire_bytes` is the wire's length, known without the data, or None where it depends on the data; `wire_limit`
    bounds it then.

    Law: decoding never reads past a wire nor trusts it; a non-finite element in makes a non-finite element out;
    zero in makes exactly zero out; if `unbiased`, the expected decoding is the block, else the codec contracts.
    """

    @property
    def bucket_mb(self) -> float:
        return 6.0

    @abstractmethod
    def wire_bytes(self, layout: Layout) -> int | None: ...

    def wire_limit(self, layout: Layout) -> int:
        """The longest wire possible, for codecs whose wires depend on the data."""
        fixed = self.wire_bytes(layout)
        return 16 * layout.numel + 1024 if fixed is None else fixed

    @abstractmethod
    def encode(self, block: Bucket, state: State, context: Context) -> Tensor: ...

    @abstractmethod
    def accumulate(self, wire: Tensor, layout: Layout, into: Tensor, weight: float) -> None: ...

    def overwrite(self, wire: Tensor, layout: Layout, out: Tensor) -> None:
        """Write what a wire says over a flat tensor."""
        self.accumulate(wire, layout, out.zero_(), 1.0)

    def mean(self, wires: Sequence[Tensor], layout: Layout, out: Tensor) -> Tensor | None:
        """Write the mean of what some wires say, added in their order, over a flat tensor.

        Returns its largest magnitude, if it came across it.
        """
        out.zero_()
        for wire in wires:
            self.accumulate(wire, layout, out, 1.0)
        out.div_(len(wires))
        return None

    def scales(self, wire: Tensor, layout: Layout) -> Tensor | None:
        """A wire's own numbers (float32) of which the largest is what no element exceeds in magnitude, and finite if and
        only if all elements are; None where that takes a look at all of them.
        """
        return None

    def decode(self, wire: Tensor, like: Bucket) -> Tensor:
        """What a wire says, as a new flat tensor."""
        out = torch.empty_like(like.flat)
        self.overwrite(wire, like.layout, out)
        return out


class Levelled(Codec):
    """Rounds each element at random to one of evenly spaced levels of a norm; of how many may change from step to step.

    Law: unbiased, and E|decode - x|^2 <= sum(spread(x)) / (4 s^2) at s levels on each side of zero; in one norm more levels
    cost more bytes.
    """

    @property
    @abstractmethod
    def steps(self) -> int:
        """Levels on each side of zero."""

    @property
    @abstractmethod
    def widths(self) -> tuple[float, ...]:
        """All the bits an element may take on the wire, its sign included, ascending; norms are counted apart."""

    @abstractmethod
    def of_width(self, bits: float) -> "Levelled":
        """The same codec at one of its `widths`."""

    @abstractmethod
    def spread(self, block: Bucket) -> Tensor:
        """For each parameter of a block the sum over its elements of the squared norm that they are rounded against, in
        double precision; not finite where the block is not. Each run (`Layout.runs`) is as if written by itself.
        """


class LinearCodec(_Encoding):
    """What we write adds up: the exchange is a sum of messages, perhaps in several rounds.

    Law: the mean is bit-equal on all ranks; permuting the ranks changes it by rounding only; what got through of mine,
    averaged over ranks, is the mean.
    """

    @property
    def bucket_mb(self) -> float:
        return 25.0

    @property
    def sum_rounding(self) -> float:
        """How much of a number each addition may round off on its way, for nobody to keep."""
        return 0.0

    @property
    def draws_alike(self) -> bool:
        """True if all ranks draw the same, so that what is lost by chance is not averaged over them."""
        return False

    def policy(self, key: str) -> Policy:
        return "mean"

    def sum_bytes(self, layout: Layout, size: int) -> list[int] | None:
        """The length of each message that `average` sums over so many ranks, where it can be told without the work."""
        return None

    @abstractmethod
    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]: ...


class AsItsCodec:
    """Promises what the codec inside does."""

    codec: Any

    @property
    def unbiased(self) -> bool:
        return self.codec.unbiased

    @property
    def needs_feedback(self) -> bool:
        return self.codec.needs_feedback

    @property
    def contracts(self) -> bool:
        return self.codec.contracts

    @property
    def bounds_residual(self) -> bool:
        return self.codec.bounds_residual

    @property
    def exact(self) -> bool:
        return self.codec.exact

    @property
    def any_size(self) -> bool:
        return self.codec.any_size

    @property
    def votes(self) -> bool:
        return self.codec.votes

    @property
    def own_size(self) -> bool:
        return self.codec.own_size

    @property
    def whole(self) -> bool:
        return self.codec.whole

    @property
    def bucket_mb(self) -> float:
        return self.codec.bucket_mb
