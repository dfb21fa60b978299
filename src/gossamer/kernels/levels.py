"""Uniform levels of any number, in a Rice code: levels near zero take fewer bits.

0, -1, 1, -2, 2, ... are written as 0, 1, 2, 3, 4, ... in records of 4096 elements; what is left over when whole words of 64 are
cut off is a record of its own. Each block of 256 has a parameter r: r low bits of each number, and its quotient in unary (q ones
and a zero, which the largest quotient does without). A record is planes of bits, each for all elements that it still says
something of, in their order: the lowest bits, the next, and so on, then "is the quotient at least 1", "at least 2", ...

Wire: the bytes of each record as two little-endian bytes; the parameter of each block, one byte, 255 if all are zero and nothing
more is said of them; the records, each of which ends on a byte. Bits are numbered from the lowest of each byte.
"""

import torch
from torch import Tensor

from gossamer.core.rng import Key
from gossamer.kernels import layout
from gossamer.kernels.backends import twin
from gossamer.kernels.layout import CorruptWire, require_count, require_vector


def levels_most(n: int, levels: int) -> int:
    """Upper bound of the bytes of n levels."""
    return layout.Coded(n, levels).most


def levels_encode(
    x: Tensor, levels: int, bucket: int, norms: Tensor, key: Key, out: Tensor, measure: bool = False
) -> int:
    """Write the levels of `quantise_encode`, up to any number from 1 to 127, in a Rice code to the front of `out`.

    Returns how many bytes these are, for which the host waits. To `measure` is to write norms by magnitude first, as `quantise`
    does. Reads 4 bytes per element.
    """
    _require(x, levels, bucket, norms)
    require_vector("out", out, torch.uint8)
    if out.numel() < levels_most(x.numel(), levels):
        raise ValueError(f"out must hold {levels_most(x.numel(), levels)} bytes, got {out.numel()}")
    return int(twin("levels", "encode", x.device)(x, levels, bucket, norms, key, measure, out))


def levels_decode(
    wire: Tensor, levels: int, bucket: int, norms: Tensor, out: Tensor, weight: float | None = None
) -> None:
    """out = norm / levels * level; with a weight out += weight times that, as `quantise_decode`. Writes 4 bytes per element.

    Safe on arbitrary bytes: what is no wire raises CorruptWire, and may leave `out` half written.
    """
    _require(out, levels, bucket, norms)
    require_vector("wire", wire, torch.uint8)
    first = layout.Coded(out.numel(), levels).first
    if wire.numel() < first:
        raise CorruptWire(f"levels: expected at least {first} bytes, got {wire.numel()}")
    factor = 1.0 if weight is None else weight
    if not twin("levels", "read", out.device)(wire, levels, bucket, norms, factor, out, weight is None):
        raise CorruptWire(f"levels: not {out.numel()} levels from -{levels} to {levels}")


def _require(x: Tensor, levels: int, bucket: int, norms: Tensor) -> None:
    require_vector("x", x)
    require_vector("norms", norms)
    if not 1 <= levels <= 127:
        raise ValueError(f"levels must be between 1 and 127, got {levels}")
    if bucket < 1:
        raise ValueError(f"bucket must be at least 1, got {bucket}")
    require_count("norms", norms, -(-x.numel() // bucket))
