"""Base-3 coding."""

# Triton's language is not typed Python.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.gpu.hashing import codes, segment_of, words
from gossamer.kernels.layout import ONE, TERNARY_BLOCK, edges_on, ternary_bytes

_BLOCKS = 16  # blocks of one encoding program
_STRETCH = 1024  # elements of one element-wise program


def encode(x: Tensor, bounds: tuple[int, ...], gains: Tensor, key: tuple[int, int], offset: int) -> Tensor:
    n, count = x.numel(), len(bounds) - 1
    wire = torch.empty(ternary_bytes(n), dtype=torch.uint8, device=x.device)
    if n:
        grid = (triton.cdiv(n, _BLOCKS * TERNARY_BLOCK),)
        table, start, steps = edges_on(bounds, x.device), words(key, offset), count.bit_length()
        _encode[grid](x, table, gains, wire, n, count, ONE, *start, steps, _BLOCKS, enable_fp_fusion=False)
    return wire


def levels(x: Tensor, bounds: tuple[int, ...], gains: Tensor, key: tuple[int, int], top: int, offset: int) -> Tensor:
    n, count = x.numel(), len(bounds) - 1
    out = torch.empty(n, dtype=torch.int8, device=x.device)
    if n:
        grid = (triton.cdiv(n, _STRETCH),)
        table, start, steps = edges_on(bounds, x.device), words(key, offset), count.bit_length()
        _levels[grid](x, table, gains, out, n, count, top * ONE, *start, steps, _STRETCH, enable_fp_fusion=False)
    return out


def accumulate(wire: Tensor, bounds: tuple[int, ...], units: Tensor, out: Tensor) -> None:
    n, count = out.numel(), len(bounds) - 1
    if n:
        grid = (triton.cdiv(n, _STRETCH),)
        table, steps = edges_on(bounds, out.device), count.bit_length()
        _accumulate[grid](wire, table, units, out, n, count, steps, _STRETCH, enable_fp_fusion=False)


@triton.jit(do_not_specialize=["count", "one", "counter", "k1"])
def _encode(x, edges, gains, wire, n, count, one, counter, k1, STEPS: tl.constexpr, BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    lane = tl.arange(0, 64)[None, :]
    size = tl.minimum(tl.maximum(n - block * 320, 0), 320)
    width = (size + 4) // 5
    value = tl.zeros([BLOCKS, 64], tl.int32)
    for row in tl.static_range(5):
        place = row * width + lane
        index = block * 320 + place
        inside = (lane < width) & (place < size)
        gain = tl.load(gains + segment_of(edges, tl.minimum(index, n - 1), count, STEPS))
        values = tl.load(x + index, mask=inside, other=0.0)
        trit = codes(values, gain, one, one, index.to(tl.uint32) + counter.to(tl.uint32), k1)
        value = value * 3 + tl.where(inside, trit, 0)
    tl.store(wire + block * 64 + lane, ((value * 256 + 242) // 243).to(tl.uint8), mask=lane < width)


@triton.jit(do_not_specialize=["count", "top", "counter", "k1"])
def _levels(x, edges, gains, out, n, count, top, counter, k1, STEPS: tl.constexpr, STRETCH: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * STRETCH + tl.arange(0, STRETCH)
    inside = index < n
    gain = tl.load(gains + segment_of(edges, tl.minimum(index, n - 1), count, STEPS))
    values = tl.load(x + index, mask=inside, other=0.0)
    level = codes(values, gain, top, 0, index.to(tl.uint32) + counter.to(tl.uint32), k1)
    tl.store(out + index, level.to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _accumulate(wire, edges, units, out, n, count, STEPS: tl.constexpr, STRETCH: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * STRETCH + tl.arange(0, STRETCH)
    inside = index < n
    block = index // 320
    place = index - block * 320
    width = (tl.minimum(tl.maximum(n - block * 320, 1), 320) + 4) // 5
    row = place // width
    power = tl.where(row == 0, 1, tl.where(row == 1, 3, tl.where(row == 2, 9, tl.where(row == 3, 27, 81))))
    byte = tl.load(wire + block * 64 + place - row * width, mask=inside, other=0).to(tl.int32)
    trit = ((((byte * power) & 255) * 3) >> 8) - 1
    unit = tl.load(units + segment_of(edges, tl.minimum(index, n - 1), count, STEPS))
    old = tl.load(out + index, mask=inside, other=0.0)
    tl.store(out + index, old + unit * trit.to(tl.float32), mask=inside)
