"""Uniform levels per bucket."""

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
from gossamer.kernels.layout import ONE, PLANE_BLOCK, gains, levels_of, middle_of, units
from gossamer.kernels.reference import quantise as reference

_BLOCKS = 4  # blocks of one encoding program
_READ = 2  # blocks of one decoding program
_STRETCH = 4096  # elements of one program that looks for norms

l2_norms = reference.l2_norms


def max_norms(x: Tensor, bucket: int) -> Tensor:
    n = x.numel()
    out = torch.zeros(triton.cdiv(n, bucket), dtype=torch.int32, device=x.device)
    if n:
        span = _span(bucket, n)
        columns = min(max(triton.next_power_of_2(span), 16), _STRETCH)
        rows, parts = _STRETCH // columns, triton.cdiv(span, columns)
        grid = (triton.cdiv(out.numel(), rows) * parts,)
        _max_norms[grid](x.view(torch.int32), out, n, out.numel(), span, rows, columns, **OPTIONS)
    return out.view(torch.float32)


def encode(x: Tensor, bits: int, bucket: int, norms: Tensor, key: Key, measure: bool, wire: Tensor) -> None:
    n = x.numel()
    if n:
        if measure:
            norms.copy_(max_norms(x, bucket))
        gain, top = gains(norms, middle_of(bits)), int(middle_of(bits) * ONE)
        grid, start = (triton.cdiv(n, _BLOCKS * PLANE_BLOCK),), words(key)
        _encode[grid](x, gain, wire, n, top, *start, bits, _span(bucket, n), _BLOCKS, **OPTIONS)


def read(wire: Tensor, bits: int, bucket: int, norms: Tensor, weight: float, out: Tensor, anew: bool) -> None:
    n = out.numel()
    if n:
        unit = units(norms, weight, levels_of(bits))
        scale, shift = (2, 1) if bits == 1 else (1, levels_of(bits))
        grid = (triton.cdiv(n, _READ * PLANE_BLOCK),)
        _read[grid](wire, unit, out, n, scale, shift, anew, bits, _span(bucket, n), _READ, **OPTIONS)


def _span(bucket: int, n: int) -> int:
    """The bucket length for which programs are compiled, cut if one bucket holds all, so that there are few lengths."""
    return min(bucket, 1 << n.bit_length())


@triton.jit(do_not_specialize=["buckets"])
def _max_norms(bits, out, n, buckets, BUCKET: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Norms of a few buckets, one per row; several programs share a bucket longer than a row."""
    PARTS: tl.constexpr = (BUCKET + COLUMNS - 1) // COLUMNS
    bucket = tl.program_id(0) // PARTS * ROWS
    column = (tl.program_id(0) % PARTS).to(tl.int64) * COLUMNS
    first = bucket.to(tl.int64) * BUCKET + column
    left = tl.minimum(n - first, ROWS * COLUMNS).to(tl.int32)
    width = tl.minimum(BUCKET - column, COLUMNS).to(tl.int32)
    row, lane = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    place = row * min(BUCKET, COLUMNS) + lane
    inside = (lane < width) & (place < left)
    magnitude = tl.load(bits + first + place, mask=inside, other=0) & 0x7FFFFFFF
    norms = bucket + tl.arange(0, ROWS)
    tl.atomic_max(out + norms, tl.max(magnitude, 1), mask=norms < buckets, sem="relaxed")


@triton.jit(do_not_specialize=["top", "counter", "k1"])
def _encode(x, gains, wire, n, top, counter, k1, BITS: tl.constexpr, BUCKET: tl.constexpr, BLOCKS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCKS * 512)
    block = tl.arange(0, BLOCKS)[:, None]
    left = tl.minimum(n - first, BLOCKS * 512).to(tl.int32)
    size = tl.minimum(tl.maximum(left - block * 512, 0), 512)
    counter = counter.to(tl.uint32) + first.to(tl.uint32)
    start = block * (64 * BITS)
    for step in tl.static_range(4):
        if BITS & (8 >> step):
            byte, length = _plane(
                x, gains, first, size, top, counter, k1, BUCKET, BLOCKS, 8 >> step, BITS & (16 - (16 >> step))
            )
            lane = tl.arange(0, 64 * (8 >> step))[None, :]
            tl.store(wire + first // 8 * BITS + (start + lane), byte.to(tl.uint8), mask=lane < length)
            start += length


@triton.jit
def _plane(
    x, gains, first, size, top, counter, k1,
    BUCKET: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, BELOW: tl.constexpr
):  # fmt: skip
    """The bytes of the plane with bits BELOW to BELOW + WIDTH of each code, and their number per block."""
    block, lane = tl.arange(0, BLOCKS)[:, None], tl.arange(0, 64 * WIDTH)[None, :]
    length = (size * WIDTH + 7) // 8
    byte = tl.zeros([BLOCKS, 64 * WIDTH], tl.int32)
    for row in tl.static_range(8 // WIDTH):
        inside = (lane < length) & (row * length + lane < size)
        place = block * 512 + row * length + lane
        gain = tl.load(gains + first // BUCKET + bucket_of(first, place, BUCKET), mask=inside, other=0.0)
        values = tl.load(x + first + place, mask=inside, other=0.0)
        code = codes(values, gain, top, top, place.to(tl.uint32) + counter, k1)
        part = (tl.where(inside, code, 0) >> BELOW) & ((1 << WIDTH) - 1)
        byte = byte | (part << (row * WIDTH))
    return byte, length


@triton.jit(do_not_specialize=["scale", "shift"])
def _read(
    wire, units, out, n, scale, shift,
    ANEW: tl.constexpr, BITS: tl.constexpr, BUCKET: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * (BLOCKS * 512)
    block, place = tl.arange(0, BLOCKS)[:, None], tl.arange(0, 512)[None, :]
    left = tl.minimum(n - first, BLOCKS * 512).to(tl.int32)
    size = tl.minimum(tl.maximum(left - block * 512, 0), 512)
    code = codes_at(wire + first // 8 * BITS, block, place, size, BITS)
    level = (code * scale - shift).to(tl.float32)
    place = block * 512 + place
    unit = tl.load(units + first // BUCKET + bucket_of(first, place, BUCKET), mask=place < left, other=0.0)
    old = 0.0 if ANEW else tl.load(out + first + place, mask=place < left, other=0.0)
    tl.store(out + first + place, old + unit * level, mask=place < left)


@triton.jit
def bucket_of(first, place, BUCKET: tl.constexpr):
    """Bucket of each position, relative to the first bucket of the program, so that 32 bits are enough."""
    into = first % BUCKET
    if BUCKET < 1 << 30:
        return (into.to(tl.int32) + place) // BUCKET
    return (place >= BUCKET - into).to(tl.int32)


@triton.jit
def codes_at(wire, block, place, size, BITS: tl.constexpr):
    """The codes at each position of some blocks, gathered from their planes; 0 beyond the end of a block."""
    start = block * (64 * BITS)
    code = tl.zeros_like(block + place)
    for step in tl.static_range(4):
        if BITS & (8 >> step):
            length = (size * (8 >> step) + 7) // 8
            part = _part_at(wire, start, place, size, length, 8 >> step)
            code = code | (part << (BITS & (16 - (16 >> step))))  # wider planes hold the lower bits
            start += length
    return code


@triton.jit
def _part_at(wire, start, place, size, length, WIDTH: tl.constexpr):
    """The bits of one plane, with rows of `length` bytes, for the element at each position."""
    row = tl.zeros_like(start + place)
    for passed in tl.static_range(1, 8 // WIDTH):  # cheaper than a division
        row = tl.where(place >= passed * length, passed, row)
    byte = tl.load(wire + (start + place - row * length), mask=place < size, other=0).to(tl.int32)
    return (byte >> (row * WIDTH)) & ((1 << WIDTH) - 1)
