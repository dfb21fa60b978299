"""bfloat16 with its rounding error, in integer arithmetic; float16 runs as torch operations."""

# Triton's language is not typed Python.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.gpu.options import OPTIONS
from gossamer.kernels.reference import cast as reference

_STRETCH = 1024

accumulate = reference.accumulate


def feedback(g: Tensor, residual: Tensor, dtype: torch.dtype) -> Tensor:
    n = g.numel()
    if dtype != torch.bfloat16 or n == 0:
        return reference.feedback(g, residual, dtype)
    wire = torch.empty(n, dtype=torch.int16, device=g.device)
    _feedback[(triton.cdiv(n, _STRETCH),)](g, residual, wire, n, _STRETCH, **OPTIONS)
    return wire.view(torch.uint8)


@triton.jit
def _feedback(g, residual, wire, n, STRETCH: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * STRETCH
    place = tl.arange(0, STRETCH)
    inside = place < tl.minimum(n - first, STRETCH).to(tl.int32)
    p = tl.load(g + first + place, mask=inside, other=0.0) + tl.load(residual + first + place, mask=inside, other=0.0)
    bits = p.to(tl.uint32, bitcast=True)
    word = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    word = tl.where(p == p, word, 0x7FC0).to(tl.uint32)
    tl.store(wire + first + place, word.to(tl.int16), mask=inside)
    tl.store(residual + first + place, p - (word << 16).to(tl.float32, bitcast=True), mask=inside)
