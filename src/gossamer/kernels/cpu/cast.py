"""bfloat16 with its rounding error. float16 stays with torch, which has the machine's conversion instruction."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossamer.core.rooms import fresh
from gossamer.kernels.cpu.compile import Floats, kernel
from gossamer.kernels.cpu.hints import prefetch, wide
from gossamer.kernels.reference import cast as reference

Words = npt.NDArray[np.uint16]
_CHUNK = 1024


def feedback(g: Tensor, residual: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype != torch.bfloat16:
        return reference.feedback(g, residual, dtype)
    wire = fresh(2 * g.numel(), g.device)
    _feedback(g.detach().numpy(), residual.detach().numpy(), wire.numpy().view(np.uint16))
    return wire


def accumulate(wire: Tensor, dtype: torch.dtype, out: Tensor, weight: float) -> None:
    if dtype != torch.bfloat16:
        reference.accumulate(wire, dtype, out, weight)
        return
    words = (wire if wire.storage_offset() % 2 == 0 else wire.clone()).numpy().view(np.uint16)
    _accumulate(words, out.detach().numpy(), np.float32(weight))


@kernel
def _feedback(g: Floats, residual: Floats, wire: Words) -> None:
    for lo in range(0, g.size, _CHUNK):
        hi = min(lo + _CHUNK, g.size)
        prefetch(g, hi, hi + _CHUNK)
        prefetch(residual, hi, hi + _CHUNK)
        _step(g[lo:hi], residual[lo:hi], wire[lo:hi])


@kernel
def _step(g: Floats, residual: Floats, wire: Words) -> None:
    wide()
    for j in range(g.size):
        p = np.float32(g[j] + residual[j])
        bits = np.float32(p).view(np.uint32)
        odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
        word = np.uint32(np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd) >> np.uint32(16))
        word = word if p == p else np.uint32(0x7FC0)
        wire[j] = np.uint16(word)
        residual[j] = p - np.uint32(word << np.uint32(16)).view(np.float32)


@kernel
def _accumulate(wire: Words, out: Floats, weight: np.float32) -> None:
    wide()
    for j in range(out.size):
        out[j] += weight * np.uint32(np.uint32(wire[j]) << np.uint32(16)).view(np.float32)
