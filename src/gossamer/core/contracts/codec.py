"""The contracts of codecs: `Codec` writes wires that any rank can read, `LinearCodec` messages that can be summed."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, Chunks, Layout, State
from gossamer.core.contracts.context import Context, Policy, ReduceResult
from gossamer.core.contracts.lossy import Lossy
from gossamer.core.verbs import Program


class _Encoding(Lossy):
    """The properties that both kinds of codecs have."""

    kind: ClassVar[str] = "codec"

    @abstractmethod
    def omega(self, layout: Layout) -> float:
        """E|decode - x|^2 <= omega |x|^2 for an unbiased codec; inf for a biased one."""


class Biased(_Encoding):
    """The properties of a codec whose decoding is not right on average: `class MyCodec(Biased, Codec)`."""

    @property
    def unbiased(self) -> bool:
        return False

    def omega(self, layout: Layout) -> float:
        return float("inf")


class Codec(_Encoding):
    """Encodes a bucket on each rank; any rank can decode the wire.

    `encode` turns a bucket into one wire; `accumulate` adds `weight` times the decoded wire to a flat tensor.
    `wire_bytes` is the wire's length, known without the data, or None where it depends on the data; `wire_limit`
    bounds it then.

    Law: decoding never reads past a wire nor trusts it; a non-finite element in makes a non-finite element out;
    zero in makes exactly zero out; if `unbiased`, the expected decoding is the bucket, else the codec contracts.
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

    def wire_lengths(self, layout: Layout, count: int) -> tuple[int, ...] | None:
        """`wire_bytes` of each of `count` chunks, or None where they depend on the data. A layout remembers them."""
        known, key = layout.wire_lengths, (self, count)
        if key not in known:
            lengths = [self.wire_bytes(chunk) for chunk in layout.chunks(count)]
            known[key] = None if None in lengths else tuple(n or 0 for n in lengths)
        return known[key]

    def encode_each(self, chunks: Chunks, state: State, context: Context) -> Sequence[Tensor]:
        """The wires of a bucket's chunks, as `encode` makes them; of fixed length each."""
        return [self.encode(chunk, state, context) for chunk in chunks]

    def accumulate_each(self, wires: Sequence[Tensor], layout: Layout, into: Tensor) -> None:
        """Add decoded wires to a flat tensor, in their order, as `accumulate` adds each with weight 1."""
        for wire in wires:
            self.accumulate(wire, layout, into, 1.0)

    def overwrite(self, wire: Tensor, layout: Layout, out: Tensor) -> None:
        """Decode a wire into a flat tensor, overwriting it."""
        self.accumulate(wire, layout, out.zero_(), 1.0)

    def mean(self, wires: Sequence[Tensor], layout: Layout, out: Tensor) -> Tensor | None:
        """Write the mean of decoded wires, added in their order, into a flat tensor.

        Returns the mean's largest magnitude, if that is known without another pass.
        """
        out.zero_()
        for wire in wires:
            self.accumulate(wire, layout, out, 1.0)
        out.div_(len(wires))
        return None

    def scales(self, wire: Tensor, layout: Layout) -> Tensor | None:
        """The scales in a wire (float32). The largest bounds the magnitude of every element, and is finite if and
        only if all elements are; None where that takes a look at all of them.
        """
        return None

    def decode(self, wire: Tensor, like: Bucket) -> Tensor:
        """Decode a wire into a new flat tensor."""
        out = torch.empty_like(like.flat)
        self.overwrite(wire, like.layout, out)
        return out


class Levelled(Codec):
    """Rounds each element at random to one of evenly spaced levels of a norm; the number of levels may change between steps.

    Law: unbiased, and E|decode - x|^2 <= sum(spread(x)) / (4 s^2) at s levels on each side of zero; in one norm more levels
    cost more bytes.
    """

    @property
    @abstractmethod
    def steps(self) -> int:
        """The number of levels on each side of zero."""

    @property
    @abstractmethod
    def widths(self) -> tuple[float, ...]:
        """The possible bits per element on the wire, sign included, ascending; norms are counted separately."""

    @abstractmethod
    def of_width(self, bits: float) -> "Levelled":
        """The same codec at one of its `widths`."""

    @abstractmethod
    def spread(self, block: Bucket) -> Tensor:
        """For each parameter of a bucket the sum over its elements of the squared norm that they are rounded against, in
        double precision; not finite where the bucket is not. Each run (`Layout.runs`) is as if written by itself.
        """


class LinearCodec(_Encoding):
    """Encodes buckets as messages that can be summed over ranks, perhaps in several rounds.

    Law: the mean is bit-equal on all ranks; permuting the ranks changes it by rounding only; the sent part of each rank's input,
    averaged over ranks, is the mean.
    """

    def policy(self, key: str) -> Policy:
        return "mean"

    def sum_bytes(self, layout: Layout, size: int) -> list[int] | None:
        """The length of each message that `average` sums over `size` ranks; None where it depends on the data."""
        return None

    @abstractmethod
    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]: ...


class AsItsCodec:
    """Forwards the properties of the codec inside."""

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
