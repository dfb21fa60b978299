"""DIANA's own quantiser: keep each element with probability |x_k| / norm, and send its sign and the bucket's norm."""

from typing import Annotated, Literal, final

import torch
from torch import Tensor

from gossamer.codecs.base import Unbiased
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Codec, Context
from gossamer.core.errors import WireError
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice
from gossamer.core.wire import expect, pack, take


@final
@part("bernoulli", sample="bernoulli(bucket=4)")
class Bernoulli(Unbiased, Codec):
    """Keep each element of a bucket with probability |x_k| / |x|_p, and decode it as sign(x_k) |x|_p.

    Unbiased; E|Q(x) - x|^2 = |x|_1 |x|_p - |x|^2 per bucket of d elements, at most d - 1 times |x|^2 for the sum norm (p = 1)
    and sqrt(d) - 1 times for the Euclidean one (p = 2). It keeps |x|_1 / |x|_p elements on average: one for p = 1, at most
    sqrt(d) for p = 2. For p = infinity, which keeps more, and for two bits an element whatever p, there is
    `qsgd(bits=2, norm='max')`.

    Use: with `diana()` on convex problems where bytes matter more than steps: about two numbers per bucket.

    Not for: training whose steps count: its variance is high. Nor GPUs: the host does not know the length of a message in
    advance.

    Wire: 4 bytes for the number of kept elements, 4 of float32 norm per bucket, and 4 of index and sign for each kept element;
    lengths are random, and cost one more small gather.

    >>> from gossamer.core.rng import CounterRng
    >>> block = Bucket.of({"w": torch.tensor([0.0, -3.0, 0.0, 0.0])})
    >>> codec = Bernoulli(bucket=4)
    >>> wire = codec.encode(block, {}, Context(0, 1, 0, CounterRng(0, 0, 0)))
    >>> wire.numel(), codec.decode(wire, block)
    (12, tensor([ 0., -3.,  0.,  0.]))

    Paper: Mishchenko, Gorbunov, Takac, Richtarik, Distributed Learning with Compressed Gradient Differences, 2019.
    """

    norm: Annotated[Literal["l1", "l2"], Choice("l1", "l2")] = "l1"
    bucket: Annotated[int, Choice(4, 8, 16, 32, 64)] = 64

    def __post_init__(self) -> None:
        require(self.bucket >= 1, f"bernoulli: bucket must be at least 1, got {self.bucket}")

    @property
    def contracts(self) -> bool:
        return self._omega(self.bucket) < 1

    def omega(self, layout: Layout) -> float:
        return self._omega(min(self.bucket, max(layout.numel, 1)))

    def _omega(self, n: int) -> float:
        return (n if self.norm == "l1" else n**0.5) - 1.0

    def wire_bytes(self, layout: Layout) -> int | None:
        return None

    def wire_limit(self, layout: Layout) -> int:
        return 4 * (1 + self._buckets(layout.numel) + layout.numel)

    def encode(self, block: Bucket, state: State, context: Context) -> Tensor:
        flat = block.flat.double()
        norms = self._norms(flat)
        shares = flat.abs() / _each(norms.double(), self.bucket, block.numel)
        # No number is below 0 / 0.
        kept = context.rng.uniform(f"{block.name}/bernoulli", block.numel).to(flat.device) < shares
        places = kept.nonzero().view(-1)
        signed = torch.where(flat[places] < 0, ~places, places)  # the sign of a place is its element's
        count = torch.tensor([len(places)], dtype=torch.int32, device=flat.device)
        return pack(count, norms, signed.int())

    def accumulate(self, wire: Tensor, layout: Layout, into: Tensor, weight: float) -> None:
        head, rest = take(wire, torch.int32, 1)
        norms, rest = take(rest, torch.float32, self._buckets(layout.numel))
        count = int(head)
        if not 0 <= count <= layout.numel:
            raise WireError(f"bernoulli: {count} of {layout.numel} elements cannot have been kept")
        expect(rest, 4 * count, "bernoulli places")
        signed = take(rest, torch.int32, count)[0].long()
        places = torch.where(signed < 0, ~signed, signed)
        if places.numel() and not bool(((places[1:] > places[:-1]).all()) & (places[-1] < layout.numel)):
            raise WireError(f"bernoulli: indices must ascend, and lie below {layout.numel}")
        norms = norms.to(into.dtype)
        values = norms[places // self.bucket]
        into.index_add_(0, places, torch.where(signed < 0, -values, values), alpha=weight)
        spoilt = ~norms.isfinite()  # of such a bucket nothing may have been kept
        into[: layout.numel][_each(spoilt, self.bucket, layout.numel)] = torch.nan

    def _norms(self, flat: Tensor) -> Tensor:
        """Norm of each bucket, in the precision in which it is sent, since probabilities must use the same value."""
        count = self._buckets(flat.numel())
        padded = torch.zeros(count * self.bucket, dtype=flat.dtype, device=flat.device)
        padded[: flat.numel()] = flat
        return padded.view(count, self.bucket).norm(1 if self.norm == "l1" else 2, dim=1).float()

    def _buckets(self, numel: int) -> int:
        return -(-numel // self.bucket)


def _each(values: Tensor, bucket: int, numel: int) -> Tensor:
    """A bucket's value for each of its elements."""
    return values.repeat_interleave(bucket)[:numel]
