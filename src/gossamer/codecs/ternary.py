"""TernGrad: every element becomes -s, 0 or +s."""

from typing import Annotated, Literal, final

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.codecs.base import FewBytes, SingleCodec
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Context, LinearCodec, ReduceResult
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice, Range
from gossamer.core.verbs import Program, all_reduce
from gossamer.core.wire import expect, take
from gossamer.kernels.layout import divisor, lengths_on
from gossamer.kernels.scales import clipped, clipped_scales


@final
@part("ternary")
class Ternary(FewBytes, SingleCodec, LinearCodec):
    """TernGrad: clip at `clip` deviations, then stochastic rounding to the levels of the tensor's scale.

    s = min(c sigma, max |g|) per tensor;  t = sign(g) floor(L min(|g|/s, 1) + u), u ~ U[0, 1);  decoded s t / L.
    Unbiased for the clipped gradient f; with L = 1 its variance is s |f|_1 - |f|^2. `clip=0` switches clipping off.
    An element's position between two levels is rounded down to 2^-23 of a level: it is unbiased to that precision only.

    sigma is the deviation about zero, the root mean square. Then clipping changes at most d / c^2 of d elements, no sign, and
    <f, g> >= min(1, c sigma / max |g|) |g|^2: the clipped gradient may be shorter than g, but never points against it. Its
    share along g is .988 for a Gaussian; for a small Transformer's gradients .73 to .95 in matrices of the layers, but .19 and
    .28 in the head and the embedding, where a few rows hold nearly all: a rule can send those through another exchange. The
    paper's deviation about the mean (`deviation="centred"`) is the same for tensors with a small mean, and has no such bound:
    for elements between 1 and 1.01 the share is .007. So it is refused, except with `none(allow_biased=True)`.

    Use: for 20 times fewer bytes without a memory; more `levels` have less noise and need more bytes.

    Not for: training whose steps count: its noise costs some.

    Wire: ceil(d / 5) + 4 bytes a tensor for one level (base 3); 4 ceil(d / fields) for more, fields of log2(2 L + 1) bits.
    Under `allreduce` the scale is shared (one all-reduce of 4 bytes a tensor) and levels travel in int32 lanes wide enough
    for the sum of N: exact integers, bit-equal whatever the order.

    >>> from gossamer.core.rng import CounterRng
    >>> block = Bucket.of({"w": torch.tensor([0.5, -0.5, 0.0])})
    >>> codec = Ternary(clip=0.0)
    >>> wire = codec.encode(block, {}, Context(0, 1, 0, CounterRng(0, 0, 0)))
    >>> wire.numel(), codec.decode(wire, block)
    (5, tensor([ 0.5000, -0.5000,  0.0000]))

    Paper: Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning, NIPS 2017.
    """

    clip: Annotated[float, Range(1.5, 5.0)] = 2.5
    levels: Annotated[int, Choice(1, 2, 3, 7)] = 1
    deviation: Literal["zero", "centred"] = "zero"

    def __post_init__(self) -> None:
        require(
            self.clip == 0 or self.clip > 1,
            f"ternary: clip must be 0 (off) or more than 1, got {self.clip}: less may clip all elements; the paper uses 2.5",
        )
        require(1 <= self.levels <= 127, f"ternary: levels must be between 1 and 127, got {self.levels}")

    @property
    def unbiased(self) -> bool:
        return self.clip == 0

    @property
    def needs_feedback(self) -> bool:
        return self.clip > 0 and self.deviation == "centred"  # about zero, what clipping takes is bounded

    @property
    def contracts(self) -> bool:
        return False  # its variance can exceed the gradient itself

    def omega(self, layout: Layout) -> float:
        """Bound of the relative variance, per tensor of d elements with its own scale: (sqrt(1 + (d - 1) / L^2) - 1) / 2."""
        if not self.unbiased:
            return float("inf")
        largest = max((1, *(s.numel for s in layout.segments)))
        return ((1 + (largest - 1) / self.levels**2) ** 0.5 - 1) / 2

    def wire_bytes(self, layout: Layout) -> int:
        return 4 * len(layout.segments) + _payload_bytes(layout.numel, self.levels)

    def encode(self, block: Bucket, state: State, context: Context) -> Tensor:
        flat, layout, key = block.flat.float(), block.layout, context.rng.key(f"{block.name}/ternary")
        wire = layout.buffers.of(self.wire_bytes(layout), flat.device)
        scales, payload = take(wire, torch.float32, len(layout.segments))
        if self.levels == 1 and self.deviation == "zero":
            kernels.ternary_encode(flat, layout.bounds, scales, key, payload, self.clip)
            return wire
        scales.copy_(self._scales(flat, layout))
        if self.levels == 1:
            kernels.ternary_encode(flat, layout.bounds, scales, key, out=payload)
        else:
            levels = kernels.ternary_levels(flat, layout.bounds, scales, key, self.levels)
            payload.copy_(kernels.lanes_pack(levels, self.levels, 1).view(torch.uint8))
        return wire

    def read(self, wire: Tensor, layout: Layout, out: Tensor, weight: float | None = None) -> None:
        scales, payload = self._open(wire, layout)
        kernels.ternary_decode(payload, layout.bounds, scales, out, weight)

    def overwrite(self, wire: Tensor, layout: Layout, out: Tensor) -> None:
        if self.levels == 1:
            super().overwrite(wire, layout, out)
        else:
            self.accumulate(wire, layout, out.zero_(), 1.0)

    def accumulate(self, wire: Tensor, layout: Layout, into: Tensor, weight: float) -> None:
        if self.levels == 1:
            super().accumulate(wire, layout, into, weight)
            return
        scales, payload = self._open(wire, layout)
        lanes, _ = take(payload, torch.int32, payload.numel() // 4)
        summed = kernels.lanes_unpack(lanes, layout.numel, self.levels, 1)
        into.add_(_scaled(summed, scales.to(into.dtype), layout, self.levels), alpha=weight)

    def scales(self, wire: Tensor, layout: Layout) -> Tensor | None:
        return self._open(wire, layout)[0]

    def _open(self, wire: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        expect(wire, self.wire_bytes(layout), "ternary")
        return take(wire, torch.float32, len(layout.segments))

    def sum_bytes(self, layout: Layout, size: int) -> list[int]:
        return [4 * len(layout.segments), 4 * kernels.lane_count(layout.numel, self.levels, size)]

    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        """Average with shared scales: all-reduce the scales, then sum integer levels in packed lanes."""
        flat, layout, key = block.flat.float(), block.layout, context.rng.key(f"{block.name}/ternary")
        own = self._scales(flat, layout)
        own = torch.where(own.isfinite(), own, torch.inf)  # a maximum may swallow NaN, never inf
        scales = yield from all_reduce(own, "max")
        levels = kernels.ternary_levels(flat, layout.bounds, scales, key, self.levels)
        lanes = yield from all_reduce(kernels.lanes_pack(levels, self.levels, context.size))
        summed = kernels.lanes_unpack(lanes, layout.numel, self.levels, context.size)
        scales = scales.to(block.flat.dtype)
        mean = _scaled(summed, scales, layout, self.levels * context.size)

        def add_sent(into: Tensor, weight: float) -> None:
            into.add_(_scaled(levels, scales, layout, self.levels), alpha=weight)

        return ReduceResult(mean, add_sent)

    def _scales(self, flat: Tensor, layout: Layout) -> Tensor:
        if self.clip == 0 or self.deviation == "zero":
            return clipped_scales(flat, layout.bounds, self.clip)
        # A constant tensor has no deviation about its mean; its largest element must not be clipped to nothing.
        return clipped(*kernels.absmax_and_std(flat, layout.bounds), self.clip)


def _scaled(levels: Tensor, scales: Tensor, layout: Layout, steps: int) -> Tensor:
    """Levels times their tensor's scale; a scale that is not finite makes NaN also where the level is zero."""
    unit = torch.where(scales.isfinite(), scales / divisor(steps, scales.device), torch.nan)
    counts = lengths_on(layout.bounds, scales.device)
    return levels.to(scales.dtype).mul_(torch.repeat_interleave(unit, counts, output_size=layout.numel))


def _payload_bytes(n: int, levels: int) -> int:
    if levels == 1:
        return kernels.ternary_bytes(n)
    fields = 31 // (2 * levels).bit_length()
    return 4 * -(-n // fields)
