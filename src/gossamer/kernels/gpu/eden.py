"""Random rotations by Hadamard's matrix: a program holds one block in registers, and reads it once."""

# Triton's language is not typed Python.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.core.rng import Key
from gossamer.kernels.gaussian import tables_on
from gossamer.kernels.gpu import OPTIONS
from gossamer.kernels.gpu.hashing import word, words
from gossamer.kernels.gpu.quantise import codes_at
from gossamer.kernels.layout import PLANE_BLOCK, Rotated, Rotation

_BLOCKS = 4  # blocks of one packing program
# The fewest warps that hold a block need more registers each, and have them.
_WIDE = OPTIONS | ({"maxnreg": 255} if "maxnreg" in OPTIONS else {})


def encode(x: Tensor, form: Rotation, key: Key, scales: Tensor, wire: Tensor) -> None:
    n, at = x.numel(), 0
    (bits, _), (levels, limits) = form, tables_on(form.bits, x.device)
    codes = torch.empty(n, dtype=torch.uint8, device=x.device)
    for begin, count, size in Rotated(n, form.block).stretches:
        _encode[(count,)](
            x, levels, limits, scales, codes, begin, at, *words(key), bits, size, num_warps=_warps(size), **_WIDE
        )
        at += count
    if n:
        _pack[(triton.cdiv(n, _BLOCKS * PLANE_BLOCK),)](codes, wire, n, bits, _BLOCKS, **OPTIONS)


def read(wire: Tensor, form: Rotation, key: Tensor, units: Tensor, out: Tensor, anew: bool) -> None:
    n, at = out.numel(), 0
    (bits, _), (levels, _) = form, tables_on(form.bits, out.device)
    for begin, count, size in Rotated(n, form.block).stretches:
        _read[(count,)](wire, levels, key, units, out, n, begin, at, anew, bits, size, num_warps=_warps(size), **_WIDE)
        at += count


def _warps(size: int) -> int:
    """Number of warps, so that a thread holds few elements."""
    return max(size // 512, 1)


@triton.jit
def _butterflies(x, STEP: tl.constexpr, SIZE: tl.constexpr):
    """The sums and the differences of elements that are STEP apart."""
    pairs = tl.permute(tl.reshape(x, [SIZE // (2 * STEP), 2, STEP]), (0, 2, 1))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), [SIZE])


@triton.jit
def _signed(x, first, counter, k1, SIZE: tl.constexpr):
    """Change signs by the words from this number on."""
    drawn = word((first + tl.arange(0, SIZE // 32)).to(tl.uint32) + counter, k1)
    bit = (drawn[:, None] >> tl.arange(0, 32)[None, :].to(tl.uint32)) & 1
    return tl.where(tl.reshape(bit, [SIZE]) == 1, -x, x)


@triton.jit
def _rotated(x, first, counter, k1, SIZE: tl.constexpr):
    """The transform without its factor, the second signs, and the transform again."""
    for k in tl.static_range(7):
        if 32 << k < SIZE:
            x = _butterflies(x, 32 << k, SIZE)
    for k in tl.static_range(5):
        x = _butterflies(x, 1 << k, SIZE)
    x = _signed(x, first, counter + 67108864, k1, SIZE)  # as `layout.SECOND_SIGNS`
    for k in tl.static_range(5):
        x = _butterflies(x, 16 >> k, SIZE)
    for k in tl.static_range(7):
        if 2048 >> k < SIZE:
            x = _butterflies(x, 2048 >> k, SIZE)
    return x


@triton.jit
def _halved(x, SIZE: tl.constexpr):
    """The first of two levels of `_total`: halves onto halves."""
    return tl.sum(tl.reshape(x, [2, SIZE // 2]), 0)


@triton.jit
def _total(x, SIZE: tl.constexpr):
    """The sum, halves onto halves."""
    for k in tl.static_range(12):
        if SIZE >> k > 1:
            x = _halved(x, SIZE >> k)
    return tl.sum(x, 0)


@triton.jit(do_not_specialize=["begin", "at", "counter", "k1"])
def _encode(
    x, levels, limits, scales, codes, begin, at, counter, k1, BITS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    start = begin.to(tl.int64) + tl.program_id(0).to(tl.int64) * SIZE
    place = tl.arange(0, SIZE)
    values = tl.load(x + start + place)
    top = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    power = tl.minimum(tl.maximum(255 - (top >> 23), 1), 253)
    factor = (power << 23).to(tl.float32, bitcast=True)
    back = ((254 - power) << 23).to(tl.float32, bitcast=True)
    first, counter = (start // 32).to(tl.int32), counter.to(tl.uint32)
    z = _rotated(_signed(values * factor, first, counter, k1, SIZE), first, counter, k1, SIZE)
    mean = _total(z * z, SIZE) * (1.0 / SIZE)
    root = tl.sqrt(mean.to(tl.float64)).to(tl.float32)  # whose rounding is that of a root in 32 bits
    size = tl.abs(z)
    code = tl.zeros([SIZE], tl.int32)
    level = tl.zeros([SIZE], tl.float32) + tl.load(levels)
    for i in range((1 << (BITS - 1)) - 1):  # unrolled it would keep all limits and levels in registers
        above = size > tl.load(limits + i) * root
        code += above.to(tl.int32)
        level = tl.where(above, tl.load(levels + i + 1), level)
    code = code | ((z < 0).to(tl.int32) << (BITS - 1))
    tl.store(codes + start + place, code.to(tl.uint8))
    scale = (mean.to(tl.float64) / _total(size * level, SIZE).to(tl.float64)).to(tl.float32) * back
    scale = tl.where(mean == 0, 0.0, scale)
    tl.store(scales + at + tl.program_id(0), tl.where(top >= 0x7F800000, float("nan"), scale))


@triton.jit
def _pack(codes, wire, n, BITS: tl.constexpr, BLOCKS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCKS * 512)
    block = tl.arange(0, BLOCKS)[:, None]
    left = tl.minimum(n - first, BLOCKS * 512).to(tl.int32)
    size = tl.minimum(tl.maximum(left - block * 512, 0), 512)
    start = block * (64 * BITS)
    for step in tl.static_range(4):
        if BITS & (8 >> step):
            byte, length = _plane(codes + first, block, size, BLOCKS, 8 >> step, BITS & (16 - (16 >> step)))
            lane = tl.arange(0, 64 * (8 >> step))[None, :]
            tl.store(wire + first // 8 * BITS + (start + lane), byte.to(tl.uint8), mask=lane < length)
            start += length


@triton.jit
def _plane(codes, block, size, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, BELOW: tl.constexpr):
    """The bytes of the plane with bits BELOW to BELOW + WIDTH of each code, and their number per block."""
    lane = tl.arange(0, 64 * WIDTH)[None, :]
    length = (size * WIDTH + 7) // 8
    byte = tl.zeros([BLOCKS, 64 * WIDTH], tl.int32)
    for row in tl.static_range(8 // WIDTH):
        inside = (lane < length) & (row * length + lane < size)
        code = tl.load(codes + (block * 512 + row * length + lane), mask=inside, other=0).to(tl.int32)
        byte = byte | (((code >> BELOW) & ((1 << WIDTH) - 1)) << (row * WIDTH))
    return byte, length


@triton.jit(do_not_specialize=["begin", "at"])
def _read(
    wire, levels, key, units, out, n, begin, at, ANEW: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    start = begin.to(tl.int64) + tl.program_id(0).to(tl.int64) * SIZE
    place = tl.arange(0, SIZE)
    whole = start // 512 * 512  # where the first block of codes begins
    inner = (start - whole).to(tl.int32) + place
    size = tl.minimum(n - whole - inner // 512 * 512, 512).to(tl.int32)
    code = codes_at(wire + whole // 8 * BITS, inner // 512, inner % 512, size, BITS)
    level = tl.load(levels + (code & ((1 << (BITS - 1)) - 1)))
    q = tl.where((code >> (BITS - 1)) == 1, -level, level)
    counter, k1 = tl.load(key).to(tl.uint32), tl.load(key + 1)
    first = (start // 32).to(tl.int32)
    y = _signed(_rotated(q, first, counter, k1, SIZE), first, counter, k1, SIZE)
    said = y * (1.0 / SIZE) * tl.load(units + at + tl.program_id(0))
    old = 0.0 if ANEW else tl.load(out + start + place)
    tl.store(out + start + place, old + said)
