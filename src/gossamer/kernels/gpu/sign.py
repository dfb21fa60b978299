"""Sign bits; the sums for scales use the reference's torch operations, in its order."""

# Triton's language is not typed Python.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.gpu import OPTIONS
from gossamer.kernels.gpu.quantise import codes_at
from gossamer.kernels.gpu.segments import entry_of, touched
from gossamer.kernels.layout import PLANE_BLOCK, Bounds, edges_on
from gossamer.kernels.reference import sign as reference

_BLOCKS = 4  # blocks of one encoding program
_READ = 2  # blocks of one decoding program


def encode(x: Tensor, bounds: Bounds, power: int, out: Tensor) -> Tensor:
    n = x.numel()
    if n:
        _encode[(triton.cdiv(n, _BLOCKS * PLANE_BLOCK),)](x, out, n, _BLOCKS, **OPTIONS)
    return reference.lengths(x, bounds, power)


def read(wire: Tensor, bounds: Bounds, units: Tensor, out: Tensor, anew: bool) -> None:
    n, count = out.numel(), len(bounds) - 1
    if n:
        grid = (triton.cdiv(n, _READ * PLANE_BLOCK),)
        table, steps = edges_on(bounds, out.device), count.bit_length()
        _read[grid](wire, table, units, out, n, count, steps, anew, _READ, **OPTIONS)


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
