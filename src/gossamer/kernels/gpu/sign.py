"""Sign bits with error feedback; the means of |p| are summed by the reference's torch operations, in its order."""

# Triton's language is not typed Python.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.gpu.hashing import segment_of
from gossamer.kernels.gpu.quantise import codes_at
from gossamer.kernels.layout import PLANE_BLOCK, edges_on, plane_bytes
from gossamer.kernels.reference import sign as reference

_BLOCKS = 8
_STRETCH = 1024


def feedback(g: Tensor, pending: Tensor, scales_prev: Tensor, bounds: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    n, count = g.numel(), len(bounds) - 1
    wire = torch.empty(plane_bytes(n, 1), dtype=torch.uint8, device=g.device)
    if n:
        grid = (triton.cdiv(n, _BLOCKS * PLANE_BLOCK),)
        table, steps = edges_on(bounds, g.device), count.bit_length()
        _feedback[grid](g, pending, table, scales_prev, wire, n, count, steps, _BLOCKS)
    return wire, reference.means(pending, bounds)


def accumulate(wire: Tensor, bounds: tuple[int, ...], units: Tensor, out: Tensor) -> None:
    n, count = out.numel(), len(bounds) - 1
    if n:
        grid = (triton.cdiv(n, _STRETCH),)
        _accumulate[grid](wire, edges_on(bounds, out.device), units, out, n, count, count.bit_length(), _STRETCH)


@triton.jit(do_not_specialize=["count"])
def _feedback(g, pending, edges, said, wire, n, count, STEPS: tl.constexpr, BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    lane = tl.arange(0, 64)[None, :]
    size = tl.minimum(tl.maximum(n - block * 512, 0), 512)
    width = (size + 7) // 8
    byte = tl.zeros([BLOCKS, 64], tl.int32)
    for row in tl.static_range(8):
        place = row * width + lane
        index = block * 512 + place
        inside = (lane < width) & (place < size)
        scale = tl.load(said + segment_of(edges, tl.minimum(index, n - 1), count, STEPS))
        old = tl.load(pending + index, mask=inside, other=0.0)
        p = (old - tl.where(old >= 0, scale, -scale)) + tl.load(g + index, mask=inside, other=0.0)
        tl.store(pending + index, p, mask=inside)
        byte = byte | (((p >= 0) & inside).to(tl.int32) << row)
    tl.store(wire + block * 64 + lane, byte.to(tl.uint8), mask=lane < width)


@triton.jit(do_not_specialize=["count"])
def _accumulate(wire, edges, units, out, n, count, STEPS: tl.constexpr, STRETCH: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * STRETCH + tl.arange(0, STRETCH)
    inside = index < n
    positive = codes_at(wire, index, n, 1) > 0
    unit = tl.load(units + segment_of(edges, tl.minimum(index, n - 1), count, STEPS))
    old = tl.load(out + index, mask=inside, other=0.0)
    tl.store(out + index, old + tl.where(positive, unit, -unit), mask=inside)
