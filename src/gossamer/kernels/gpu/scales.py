"""Magnitude per segment: each program folds a stretch into the segments it touches."""

# Triton's language is not typed Python.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.gpu.hashing import segment_of
from gossamer.kernels.layout import edges_on

_STRETCH = 4096


def absmax(x: Tensor, bounds: tuple[int, ...]) -> Tensor:
    count = len(bounds) - 1
    out = torch.zeros(count, dtype=torch.int32, device=x.device)
    if x.numel():
        grid = (triton.cdiv(x.numel(), _STRETCH),)
        steps = count.bit_length()
        _absmax[grid](x.view(torch.int32), edges_on(bounds, x.device), out, x.numel(), count, steps, _STRETCH)
    return out.view(torch.float32)


@triton.jit(do_not_specialize=["count"])
def _absmax(bits, edges, out, n, count, STEPS: tl.constexpr, STRETCH: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * STRETCH
    index = first + tl.arange(0, STRETCH)
    magnitude = tl.load(bits + index, mask=index < n, other=0) & 0x7FFFFFFF
    segment = segment_of(edges, tl.minimum(index, n - 1), count, STEPS)
    for s in range(tl.min(segment), tl.max(segment) + 1):
        tl.atomic_max(out + s, tl.max(tl.where(segment == s, magnitude, 0)))
