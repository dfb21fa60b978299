"""Sign bits, and the lengths of segments: their sums are added in the reference's order, group by group."""

# Triton's language is not typed Python.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportReturnType=false
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.gpu import OPTIONS
from gossamer.kernels.gpu.quantise import codes_at
from gossamer.kernels.gpu.segments import entry_of, touched
from gossamer.kernels.layout import PLANE_BLOCK, SUM_GROUP, Bounds, edges_on

_BLOCKS = 4  # blocks of one encoding program
_READ = 2  # blocks of one decoding program
_ROWS = 64  # groups whose sums one program adds at a time


def encode(x: Tensor, bounds: Bounds, power: int, out: Tensor) -> Tensor:
    n = x.numel()
    if n:
        _encode[(triton.cdiv(n, _BLOCKS * PLANE_BLOCK),)](x, out, n, _BLOCKS, **OPTIONS)
    return _lengths(x, bounds, power)


def read(wire: Tensor, bounds: Bounds, units: Tensor, out: Tensor, anew: bool) -> None:
    n, count = out.numel(), len(bounds) - 1
    if n:
        grid = (triton.cdiv(n, _READ * PLANE_BLOCK),)
        table, steps = edges_on(bounds, out.device), count.bit_length()
        _read[grid](wire, table, units, out, n, count, steps, anew, _READ, **OPTIONS)


def _lengths(x: Tensor, bounds: Bounds, power: int) -> Tensor:
    """mean |x| per segment, or its root mean square, as `reference.sign.lengths`."""
    count, groups = len(bounds) - 1, _groups(bounds)
    out = torch.zeros(count, dtype=torch.float32, device=x.device)
    if groups[-1]:
        table, firsts = edges_on(bounds, x.device), edges_on(groups, x.device)
        sums = torch.empty(groups[-1], 64, dtype=torch.float64, device=x.device)
        _sums[(groups[-1],)](
            x, table, firsts, sums, count, count.bit_length(), power, SUM_GROUP, num_warps=2, **OPTIONS
        )
        _means[(count,)](table, firsts, sums, out, power, _ROWS, num_warps=8, **OPTIONS)
    return out


@lru_cache(maxsize=1024)
def _groups(bounds: Bounds) -> Bounds:
    """The first group of each segment, and the number of all."""
    return (0, *accumulate(triton.cdiv(b - a, SUM_GROUP) for a, b in pairwise(bounds)))


@triton.jit
def _encode(x, wire, n, BLOCKS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCKS * 512)
    left = tl.minimum(n - first, BLOCKS * 512).to(tl.int32)
    block, lane = tl.arange(0, BLOCKS)[:, None], tl.arange(0, 64)[None, :]
    size = tl.minimum(tl.maximum(left - block * 512, 0), 512)
    width = (size + 7) // 8
    byte = tl.zeros([BLOCKS, 64], tl.int32)
    for row in tl.static_range(8):
        inside = (lane < width) & (row * width + lane < size)
        value = tl.load(x + first + (block * 512 + row * width + lane), mask=inside, other=-1.0)
        byte = byte | (((value >= 0) & inside).to(tl.int32) << row)
    tl.store(wire + first // 8 + (block * 64 + lane), byte.to(tl.uint8), mask=lane < width)


@triton.jit(do_not_specialize=["count", "steps"])
def _sums(x, edges, firsts, sums, count, steps, POWER: tl.constexpr, GROUP: tl.constexpr):
    """The sums of a group's rows of 64, one row after the other."""
    group, lane = tl.program_id(0), tl.arange(0, 64)
    segment, _ = touched(firsts, group, 1, count, steps)
    begin = tl.load(edges + segment) + (group - tl.load(firsts + segment)) * GROUP
    left = tl.minimum(tl.load(edges + segment + 1) - begin, GROUP).to(tl.int32)
    total = tl.zeros([64], tl.float64)
    for row in tl.static_range(GROUP // 64):
        place = row * 64 + lane
        value = tl.abs(tl.load(x + begin + place, mask=place < left, other=0.0)).to(tl.float64)
        total += value if POWER == 1 else value * value
    tl.store(sums + group.to(tl.int64) * 64 + lane, total)


@triton.jit
def _means(edges, firsts, sums, out, POWER: tl.constexpr, ROWS: tl.constexpr):
    """Adds halves onto halves, of a segment's groups and then of the lanes, as if their number were a power of two."""
    segment = tl.program_id(0)
    first, n = tl.load(firsts + segment), tl.load(edges + segment + 1) - tl.load(edges + segment)
    groups = (tl.load(firsts + segment + 1) - first).to(tl.int32)
    row, lane = tl.arange(0, ROWS)[:, None], tl.arange(0, 64)[None, :]
    half = 1
    while half * 2 < groups:
        half *= 2
    while half >= 1:
        both = tl.minimum(half, groups - half)  # rows that have another one in the upper half
        for start in range(0, both, ROWS):
            here = sums + (first + start + row) * 64 + lane
            inside = start + row < both
            upper = tl.load(here + half * 64, mask=inside, other=0.0)
            tl.store(here, tl.load(here, mask=inside, other=0.0) + upper, mask=inside)
        tl.debug_barrier()  # the next half reads what other threads have written
        half = half // 2
    total = tl.load(sums + first * 64 + tl.arange(0, 64), mask=tl.arange(0, 64) < groups * 64, other=0.0)
    for k in tl.static_range(6):
        total = tl.sum(tl.reshape(total, [2, 32 >> k]), 0)
    mean = tl.sum(total, 0) / tl.maximum(n, 1).to(tl.float64)
    tl.store(out + segment, (mean if POWER == 1 else tl.sqrt(mean)).to(tl.float32))


@triton.jit(do_not_specialize=["count", "steps"])
def _read(wire, edges, units, out, n, count, steps, ANEW: tl.constexpr, BLOCKS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCKS * 512)
    left = tl.minimum(n - first, BLOCKS * 512).to(tl.int32)
    low, high = touched(edges, first, left, count, steps)
    block, place = tl.arange(0, BLOCKS)[:, None], tl.arange(0, 512)[None, :]
    size = tl.minimum(tl.maximum(left - block * 512, 0), 512)
    positive = codes_at(wire + first // 8, block, place, size, 1) > 0
    unit = entry_of(units, edges, first, block * 512 + place, low, high)
    said = tl.where(positive, unit, -unit)
    if not ANEW:
        said = tl.load(out + first + (block * 512 + place), mask=place < size, other=0.0) + said
    tl.store(out + first + (block * 512 + place), said, mask=place < size)
