"""Magnitude and deviation per segment.

A maximum is folded into its segment by an atomic operation, since it does not depend on the order. Sums are added in one
order, so that a run can be repeated: every program leaves what it found of each segment in a slot of its own, and a
second launch adds up the slots.
"""

# Triton's language is not typed Python.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.gpu import OPTIONS
from gossamer.kernels.gpu.segments import of_segment, touched
from gossamer.kernels.layout import Bounds, edges_on

_STRETCH = 4096  # elements of one program of a maximum
_SUMMED = 1024  # elements of one program of the sums: doubles take twice the registers
_SLOTS = 256  # slots that are added at once


def absmax(x: Tensor, bounds: Bounds) -> Tensor:
    n, count = x.numel(), len(bounds) - 1
    out = torch.zeros(count, dtype=torch.int32, device=x.device)
    if n:
        grid, steps = (triton.cdiv(n, _STRETCH),), count.bit_length()
        table = edges_on(bounds, x.device)
        _absmax[grid](x.view(torch.int32), table, out, n, count, steps, _STRETCH, **OPTIONS)
    return out.view(torch.float32)


def absmax_and_rms(x: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    return _deviation(x, bounds, False)


def absmax_and_std(x: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    return _deviation(x, bounds, True)


def _deviation(x: Tensor, bounds: Bounds, centred: bool) -> tuple[Tensor, Tensor]:
    n, count = x.numel(), len(bounds) - 1
    if n == 0:
        return x.new_zeros(count), x.new_zeros(count)
    programs, table = triton.cdiv(n, _SUMMED), edges_on(bounds, x.device)
    # neighbours in the walk over (program, segment) differ in one of the two, so their sum names a slot
    tops = torch.empty(programs + count, dtype=torch.int32, device=x.device)
    sums = torch.empty(2, programs + count, dtype=torch.float64, device=x.device)
    top, deviation = torch.empty(count, dtype=torch.int32, device=x.device), x.new_empty(count)
    slots = (tops, sums[0], sums[1])
    steps = count.bit_length()
    _moments[(programs,)](x, table, *slots, n, count, steps, centred, _SUMMED, **OPTIONS)
    _deviations[(count,)](table, *slots, top, deviation, _SUMMED, _SLOTS, **OPTIONS)
    return top.view(torch.float32), deviation


@triton.jit(do_not_specialize=["count", "steps"])
def _absmax(bits, edges, out, n, count, steps, STRETCH: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * STRETCH
    place = tl.arange(0, STRETCH)
    size = tl.minimum(n - first, STRETCH).to(tl.int32)
    magnitude = tl.load(bits + first + place, mask=place < size, other=0) & 0x7FFFFFFF
    low, high = touched(edges, first, size, count, steps)
    for s in range(low, high + 1):
        mine = of_segment(edges, s, first, place, STRETCH)
        tl.atomic_max(out + s, tl.max(tl.where(mine, magnitude, 0), 0), sem="relaxed")


@triton.jit(do_not_specialize=["count", "steps"])
def _moments(x, edges, tops, sums, squares, n, count, steps, CENTRED: tl.constexpr, STRETCH: tl.constexpr):
    """Per segment of a stretch: max |x|, and the sums of d and d ** 2 with d = x - (its first element, or 0)."""
    first = tl.program_id(0).to(tl.int64) * STRETCH
    place = tl.arange(0, STRETCH)
    size = tl.minimum(n - first, STRETCH).to(tl.int32)
    value = tl.load(x + first + place, mask=place < size, other=0.0)
    magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    low, high = touched(edges, first, size, count, steps)
    for s in range(low, high + 1):
        mine = of_segment(edges, s, first, place, STRETCH)
        d = value.to(tl.float64)
        if CENTRED:
            d -= tl.load(x + tl.load(edges + s)).to(tl.float64)
        d = tl.where(mine, d, 0.0)
        slot = tl.program_id(0) + s
        tl.store(tops + slot, tl.max(tl.where(mine, magnitude, 0), 0))
        tl.store(sums + slot, tl.sum(d, 0) if CENTRED else 0.0)
        tl.store(squares + slot, tl.sum(d * d, 0))


@triton.jit
def _deviations(edges, tops, sums, squares, top, deviation, STRETCH: tl.constexpr, SLOTS: tl.constexpr):
    """Adds up the slots of one segment: (sum of squares - sum ** 2 / n) / n is its variance."""
    s = tl.program_id(0)
    begin, end = tl.load(edges + s), tl.load(edges + s + 1)
    low = (begin // STRETCH).to(tl.int32) + s
    high = ((end + STRETCH - 1) // STRETCH).to(tl.int32) + s
    if end == begin:
        high = low
    best = tl.zeros([SLOTS], tl.int32)
    first = tl.zeros([SLOTS], tl.float64)
    second = tl.zeros([SLOTS], tl.float64)
    for slot in range(low, high, SLOTS):
        lane = slot + tl.arange(0, SLOTS)
        best = tl.maximum(best, tl.load(tops + lane, mask=lane < high, other=0))
        first += tl.load(sums + lane, mask=lane < high, other=0.0)
        second += tl.load(squares + lane, mask=lane < high, other=0.0)
    n = tl.maximum(end - begin, 1).to(tl.float64)
    total = tl.sum(first, 0)
    variance = (tl.sum(second, 0) - total * total / n) / n
    # written so that NaN passes and a rounding error below zero does not
    root = tl.sqrt(tl.where(variance < 0.0, 0.0, variance))
    tl.store(top + s, tl.max(best, 0))
    tl.store(deviation + s, root.to(tl.float32))
