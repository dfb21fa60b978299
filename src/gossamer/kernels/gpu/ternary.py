"""Base-3 coding."""

# Triton's language is not typed Python.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.core.rng import Key
from gossamer.kernels.gpu import OPTIONS
from gossamer.kernels.gpu.hashing import codes, words
from gossamer.kernels.gpu.segments import entry_of, touched
from gossamer.kernels.layout import ONE, TERNARY_BLOCK, Bounds, edges_on, units
from gossamer.kernels.layout import gains as gains_of
from gossamer.kernels.scales import clipped_scales

_BLOCKS = 4  # blocks of one encoding program
_STRETCH = 1024  # elements of one element-wise program


def encode(x: Tensor, bounds: Bounds, scales: Tensor, clip: float | None, key: Key, wire: Tensor) -> None:
    n, count = x.numel(), len(bounds) - 1
    if clip is not None:
        scales.copy_(clipped_scales(x, bounds, clip))
    if n:
        gains, grid = gains_of(scales, 1), (triton.cdiv(n, _BLOCKS * TERNARY_BLOCK),)
        table, start, steps = edges_on(bounds, x.device), words(key), count.bit_length()
        _encode[grid](x, table, gains, wire, n, count, steps, ONE, *start, _BLOCKS, **OPTIONS)


def levels(x: Tensor, bounds: Bounds, gains: Tensor, key: Key, top: int) -> Tensor:
    n, count = x.numel(), len(bounds) - 1
    out = torch.empty(n, dtype=torch.int8, device=x.device)
    if n:
        grid = (triton.cdiv(n, _STRETCH),)
        table, start, steps = edges_on(bounds, x.device), words(key), count.bit_length()
        _levels[grid](x, table, gains, out, n, count, steps, top * ONE, *start, _STRETCH, **OPTIONS)
    return out


def read(wire: Tensor, bounds: Bounds, scales: Tensor, weight: float, out: Tensor, anew: bool) -> None:
    n, count = out.numel(), len(bounds) - 1
    if n:
        unit = units(scales, weight, 1)
        grid = (triton.cdiv(n, _STRETCH),)
        table, steps = edges_on(bounds, out.device), count.bit_length()
        _read[grid](wire, table, unit, out, n, count, steps, anew, _STRETCH, **OPTIONS)


@triton.jit(do_not_specialize=["count", "steps", "one", "counter", "k1"])
def _encode(x, edges, gains, wire, n, count, steps, one, counter, k1, BLOCKS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCKS * 320)
    left = tl.minimum(n - first, BLOCKS * 320).to(tl.int32)
    low, high = touched(edges, first, left, count, steps)
    block, lane = tl.arange(0, BLOCKS)[:, None], tl.arange(0, 64)[None, :]
    size = tl.minimum(tl.maximum(left - block * 320, 0), 320)
    width = (size + 4) // 5
    counter = counter.to(tl.uint32) + first.to(tl.uint32)
    value = tl.zeros([BLOCKS, 64], tl.int32)
    for row in tl.static_range(5):
        inside = (lane < width) & (row * width + lane < size)
        place = block * 320 + row * width + lane
        gain = entry_of(gains, edges, first, place, low, high)
        values = tl.load(x + first + place, mask=inside, other=0.0)
        trit = codes(values, gain, one, one, place.to(tl.uint32) + counter, k1)
        value = value * 3 + tl.where(inside, trit, 0)
    byte = ((value * 256 + 242) // 243).to(tl.uint8)
    tl.store(wire + first // 5 + (block * 64 + lane), byte, mask=lane < width)


@triton.jit(do_not_specialize=["count", "steps", "top", "counter", "k1"])
def _levels(x, edges, gains, out, n, count, steps, top, counter, k1, STRETCH: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * STRETCH
    place = tl.arange(0, STRETCH)
    size = tl.minimum(n - first, STRETCH).to(tl.int32)
    low, high = touched(edges, first, size, count, steps)
    gain = entry_of(gains, edges, first, place, low, high)
    values = tl.load(x + first + place, mask=place < size, other=0.0)
    counter = counter.to(tl.uint32) + first.to(tl.uint32)
    level = codes(values, gain, top, 0, place.to(tl.uint32) + counter, k1)
    tl.store(out + first + place, level.to(tl.int8), mask=place < size)


@triton.jit(do_not_specialize=["count", "steps"])
def _read(wire, edges, units, out, n, count, steps, ANEW: tl.constexpr, STRETCH: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * STRETCH
    place = tl.arange(0, STRETCH)
    size = tl.minimum(n - first, STRETCH).to(tl.int32)
    low, high = touched(edges, first, size, count, steps)
    unit = entry_of(units, edges, first, place, low, high)
    start = first % 320  # where in its block the stretch begins
    left = tl.minimum(n - (first - start), STRETCH + 320).to(tl.int32)
    inner = start.to(tl.int32) + place
    block = inner // 320
    inner -= block * 320
    width = (tl.minimum(left - block * 320, 320) + 4) // 5
    begin, power = tl.zeros_like(inner), tl.zeros_like(inner) + 1
    for row in tl.static_range(1, 5):  # comparing is cheaper than dividing by the width
        reached = inner >= row * width
        begin = tl.where(reached, row * width, begin)
        power = tl.where(reached, power * 3, power)
    byte = tl.load(wire + first // 320 * 64 + (block * 64 + inner - begin), mask=place < size, other=0)
    trit = ((((byte.to(tl.int32) * power) & 255) * 3) >> 8) - 1
    old = 0.0 if ANEW else tl.load(out + first + place, mask=place < size, other=0.0)
    tl.store(out + first + place, old + unit * trit.to(tl.float32), mask=place < size)
