"""AdaComp: signs of the elements of each bin whose residual plus twice the gradient reaches the bin's maximum."""

from functools import lru_cache
from typing import Annotated, NamedTuple, final

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, Layout, Segment, State
from gossamer.core.contracts import Biased, Codec, Context
from gossamer.core.errors import WireError
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice
from gossamer.core.wire import expect, pack, take

_LONGEST = 2**15  # elements of a bin, whose places leave a bit for the sign


@final
@part("adacomp")
class AdaComp(Biased, Codec):
    """Send signs of the elements of each bin with |G + g| >= max |G|, for gradient g and G = g + residual.

    Decoded elements have the mean magnitude of all sent elements of their parameter: of all single values the one with the least
    error. (The paper's value, the mean of the bins' maxima, is the same where each bin sends only its maximum, and adds more than
    it leaves out where bins differ.) The number of sent elements follows the gradients: one or a few per bin while they are
    similar from step to step, more where the last one points elsewhere. Nothing is sorted. Biased: error feedback is needed.

    Use: where you do not want to choose a ratio; the authors used bins of 50 for convolutions, and of 500 for all else.

    Not for: GPUs: the host must know the length of a message in advance. Nor without a memory: then everything above half of a
    bin's maximum is sent.

    Wire: 4 bytes of float32 per parameter, and for each sent element and for each bin one byte (bins up to 128 elements) or two;
    lengths depend on the data, and cost one more small gather.

    >>> from gossamer.core.rng import CounterRng
    >>> block = Bucket.of({"w": torch.tensor([0.1, -3.0, 0.2, 0.0, 1.0, 0.3])})
    >>> codec = AdaComp(bin=3)
    >>> wire = codec.encode(block, {}, Context(0, 1, 0, CounterRng(0, 0, 0)))
    >>> wire.numel(), codec.decode(wire, block)
    (8, tensor([ 0., -2.,  0.,  0.,  2.,  0.]))

    Paper: Chen, Choi, Brand, Agrawal, Zhang, Gopalakrishnan, AdaComp: Adaptive Residual Gradient Compression for Data-Parallel
    Distributed Training, AAAI 2018.
    """

    bin: Annotated[int, Choice(50, 100, 500, 1000)] = 500

    def __post_init__(self) -> None:
        require(
            1 <= self.bin <= _LONGEST,
            f"adacomp: bin must lie between 1 and {_LONGEST} elements, got {self.bin}; 50 for convolutions, 500 else",
        )

    def wire_bytes(self, layout: Layout) -> int | None:
        return None

    def wire_limit(self, layout: Layout) -> int:
        return 4 * len(layout.segments) + self._width * (_bins(self.bin, layout.segments).number + layout.numel)

    @property
    def _width(self) -> int:
        return 1 if self.bin <= 128 else 2

    def encode(self, block: Bucket, state: State, context: Context) -> Tensor:
        bins, flat = _bins(self.bin, block.layout.segments).on(block.flat.device), block.flat.float()
        places = self._chosen(block, flat).nonzero().view(-1)
        which = torch.searchsorted(bins.begin, places, right=True) - 1
        counts, mine = torch.bincount(which, minlength=bins.number), bins.segment[which]
        scales = flat.new_zeros(len(block.layout.segments), dtype=torch.float64)
        scales.index_add_(0, mine, flat[places].abs().double())
        scales /= torch.bincount(mine, minlength=len(scales)).clamp(min=1)
        words = (places - bins.begin[which]) * 2 + (flat[places] < 0)
        return pack(scales.float(), self._written(counts), self._written(words))

    def _chosen(self, block: Bucket, flat: Tensor) -> Tensor:
        """Mask of the elements to send; NaN and inf are always sent."""
        size, twice = flat.abs(), (flat + (flat if block.latest is None else block.latest.float())).abs_()
        below = torch.empty_like(flat, dtype=torch.bool)
        for s in block.layout.segments:
            middle, end = s.offset + s.numel // self.bin * self.bin, s.offset + s.numel
            for here, length in ((slice(s.offset, middle), self.bin), (slice(middle, end), end - middle)):
                if here.start < here.stop:
                    largest = size[here].view(-1, length).amax(1, keepdim=True)
                    bar = torch.where(largest > 0, largest, torch.inf)  # where all are zero, and where one is no number
                    torch.lt(twice[here].view(-1, length), bar, out=below[here].view(-1, length))
        return below.logical_not_().bitwise_and_(flat.bool())

    def accumulate(self, wire: Tensor, layout: Layout, into: Tensor, weight: float) -> None:
        bins = _bins(self.bin, layout.segments).on(into.device)
        scales, rest = take(wire, torch.float32, len(layout.segments))
        counts = self._read(rest[: self._width * bins.number], bins.number)
        total = int(counts.sum())
        expect(rest, self._width * (bins.number + total), "adacomp")
        words = self._read(rest[self._width * bins.number :], total)
        which = torch.arange(bins.number, device=into.device).repeat_interleave(counts)
        inside = words >> 1
        if bool((inside >= bins.length[which]).any()):
            raise WireError("adacomp: an index lies outside of its bin; the bytes were damaged on the way")
        values = scales[bins.segment[which]] * (1 - 2 * (words & 1))
        into.index_add_(0, bins.begin[which] + inside, values.to(into.dtype), alpha=weight)

    def _written(self, numbers: Tensor) -> Tensor:
        return numbers.to(torch.uint8 if self._width == 1 else torch.int16)  # of which the highest bit is one as well

    def _read(self, wire: Tensor, count: int) -> Tensor:
        if self._width == 1:
            return take(wire, torch.uint8, count)[0].long()
        return take(wire, torch.int16, count)[0].long() & 0xFFFF


class _Bins(NamedTuple):
    """The bins of a bucket's parameters, one after the other."""

    segment: Tensor  # each bin's parameter,
    begin: Tensor  # its first element,
    length: Tensor  # and how many it has

    @property
    def number(self) -> int:
        return len(self.segment)

    def on(self, device: torch.device) -> "_Bins":
        return self if device.type == "cpu" else _Bins(*(t.to(device) for t in self))


@lru_cache(maxsize=256)
def _bins(longest: int, segments: tuple[Segment, ...]) -> _Bins:
    firsts = torch.tensor([s.offset for s in segments], dtype=torch.long)
    lengths = torch.tensor([s.numel for s in segments], dtype=torch.long)
    counts = (lengths + longest - 1) // longest
    segment = torch.arange(len(segments)).repeat_interleave(counts)
    inside = longest * (torch.arange(len(segment)) - (counts.cumsum(0) - counts)[segment])
    return _Bins(segment, firsts[segment] + inside, (lengths[segment] - inside).clamp(max=longest))
