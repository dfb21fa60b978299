"""Uniform levels per bucket."""

# Triton's language is not typed Python.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.gpu.hashing import codes, words
from gossamer.kernels.layout import ONE, PLANE_BLOCK, levels_of, plane_bytes

_BLOCKS = 4  # blocks of one encoding program
_STRETCH = 1024  # elements of one decoding program


def encode(x: Tensor, bits: int, bucket: int, gains: Tensor, key: tuple[int, int], offset: int) -> Tensor:
    n = x.numel()
    wire = torch.empty(plane_bytes(n, bits), dtype=torch.uint8, device=x.device)
    if n:
        top = ONE // 2 if bits == 1 else levels_of(bits) * ONE
        grid = (triton.cdiv(n, _BLOCKS * PLANE_BLOCK),)
        start = words(key, offset)
        _encode[grid](x, gains, wire, n, bucket, top, *start, bits, _BLOCKS, enable_fp_fusion=False)
    return wire


def accumulate(wire: Tensor, bits: int, bucket: int, units: Tensor, out: Tensor) -> None:
    n = out.numel()
    if n:
        scale, shift = (2, 1) if bits == 1 else (1, levels_of(bits))
        grid = (triton.cdiv(n, _STRETCH),)
        _accumulate[grid](wire, units, out, n, bucket, scale, shift, bits, _STRETCH, enable_fp_fusion=False)


@triton.jit(do_not_specialize=["top", "counter", "k1"])
def _encode(x, gains, wire, n, bucket, top, counter, k1, BITS: tl.constexpr, BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    size = tl.minimum(tl.maximum(n - block * 512, 0), 512)
    start = block * (64 * BITS)
    for step in tl.static_range(4):
        if BITS & (8 >> step):
            WIDTH: tl.constexpr = 8 >> step
            BELOW: tl.constexpr = BITS & (16 - (16 >> step))  # wider planes hold the lower bits
            lane = tl.arange(0, 64 * WIDTH)[None, :]
            length = (size * WIDTH + 7) // 8
            byte = tl.zeros([BLOCKS, 64 * WIDTH], tl.int32)
            for row in tl.static_range(8 // WIDTH):
                place = row * length + lane
                index = block * 512 + place
                inside = (lane < length) & (place < size)
                gain = tl.load(gains + index // bucket, mask=inside, other=0.0)
                values = tl.load(x + index, mask=inside, other=0.0)
                code = codes(values, gain, top, top, index.to(tl.uint32) + counter.to(tl.uint32), k1)
                part = (tl.where(inside, code, 0) >> BELOW) & ((1 << WIDTH) - 1)
                byte = byte | (part << (row * WIDTH))
            tl.store(wire + start + lane, byte.to(tl.uint8), mask=lane < length)
            start += length


@triton.jit(do_not_specialize=["scale", "shift"])
def _accumulate(wire, units, out, n, bucket, scale, shift, BITS: tl.constexpr, STRETCH: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * STRETCH + tl.arange(0, STRETCH)
    inside = index < n
    code = codes_at(wire, index, n, BITS)
    unit = tl.load(units + index // bucket, mask=inside, other=0.0)
    old = tl.load(out + index, mask=inside, other=0.0)
    level = (code * scale - shift).to(tl.float32)
    tl.store(out + index, old + unit * level, mask=inside)


@triton.jit
def codes_at(wire, index, n, BITS: tl.constexpr):
    """The codes of any elements, gathered from their planes; 0 beyond n."""
    block = index // 512
    place = index - block * 512
    size = tl.minimum(tl.maximum(n - block * 512, 1), 512)
    start = block * (64 * BITS)
    code = tl.zeros_like(index).to(tl.int32)
    for step in tl.static_range(4):
        if BITS & (8 >> step):
            WIDTH: tl.constexpr = 8 >> step
            BELOW: tl.constexpr = BITS & (16 - (16 >> step))  # wider planes hold the lower bits
            length = (size * WIDTH + 7) // 8
            row = place // length
            byte = tl.load(wire + start + place - row * length, mask=index < n, other=0).to(tl.int32)
            part = (byte >> (row * WIDTH).to(tl.int32)) & ((1 << WIDTH) - 1)
            code = code | (part << BELOW)
            start += length
    return code
