"""Uniform levels with one norm per bucket: codes of 1 to 8 bits, packed as planes of power-of-two widths."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from gossamer.core.memory_pool import uninitialised
from gossamer.core.rng import Key, Keys
from gossamer.kernels import layout
from gossamer.kernels.backends import chosen, twin
from gossamer.kernels.layout import require_count, require_length, require_vector


def quantise_bytes(n: int, bits: int) -> int:
    """Bytes of n codes of `bits` bits: n * bits / 8, each plane of the last block rounded up."""
    return layout.plane_bytes(n, bits)


def bucket_norms(x: Tensor, bucket: int, kind: Literal["max", "l2"]) -> Tensor:
    """max |x| or sqrt(sum(x ** 2)) of every `bucket` consecutive elements.

    Reads 4 bytes per element. "max" is bit-equal everywhere; "l2" depends on the order of summation.
    """
    require_vector("x", x)
    _require_bucket(bucket)
    if kind not in ("max", "l2"):
        raise ValueError(f'kind must be "max" or "l2", got {kind!r}')
    return twin("quantise", f"{kind}_norms", x.device)(x, bucket)


def quantise_encode(
    x: Tensor, bits: int, bucket: int, norms: Tensor, key: Key, out: Tensor | None = None, measure: bool = False
) -> Tensor:
    """code = s + floor(x * s / norm + u), clamped to [0, 2 * s], with s = 2 ** (bits - 1) - 1; unbiased.

    The wire is written to `out`, if there is one. One bit has two points: +norm with probability (1 + x / norm) / 2, else -norm;
    a bucket whose norm is below 2^-100 is read as zero, as with more bits. To `measure` is to write norms by magnitude first, as
    `bucket_norms` has them: on a CPU each bucket is then read once from memory.
    u is the top 23 bits of mix3(i). Reads 4 and writes bits / 8 bytes per element.
    """
    wire = uninitialised(quantise_bytes(x.numel(), bits), x.device) if out is None else out
    require_vector("x", x)
    require_vector("norms", norms)
    require_count("norms", norms, _buckets(x.numel(), bucket))
    require_length(f"quantise {bits} bits", wire, quantise_bytes(x.numel(), bits))
    twin("quantise", "encode", x.device)(x, bits, bucket, norms, key, measure, wire)
    return wire


def quantise_decode(
    wire: Tensor, bits: int, bucket: int, norms: Tensor, out: Tensor, weight: float | None = None
) -> None:
    """out = norm / s * (code - s); with a weight out += weight times that. A bucket whose norm is not finite becomes NaN.

    Without a weight it is to the bit what is added to zeros, without a pass that writes them. Reads bits / 8, with a weight 4
    more, and writes 4 bytes per element.
    """
    require_vector("out", out)
    require_count("norms", norms, _buckets(out.numel(), bucket))
    require_length(f"quantise {bits} bits", wire, quantise_bytes(out.numel(), bits))
    factor = 1.0 if weight is None else weight
    twin("quantise", "read", out.device)(wire, bits, bucket, _said(bits, norms), factor, out, weight is None)


def quantise_each(x: Tensor, edges: Sequence[int], bits: int, bucket: int, keys: Keys, rows: Tensor) -> None:
    """Encode every chunk x[edges[j]:edges[j + 1]] with key j and norms that are measured, to row j: first norms, then codes.

    Rows are as wide as the longest chunk needs or wider, and a multiple of 4 bytes.
    """
    require_vector("x", x)
    lengths = [b - a for a, b in pairwise(edges)]
    if keys.shape != (len(lengths), 2) or min(lengths) < 0 or edges[0] < 0 or edges[-1] > x.numel():
        raise ValueError(f"quantise_each: every chunk needs a key, and edges rise from 0 to at most {x.numel()}")
    longest = max(lengths)
    _require_rows(rows, len(lengths), 4 * _buckets(longest, bucket) + quantise_bytes(longest, bits))
    if rows.shape[1] % 4:
        raise ValueError(
            f"quantise_each: rows of {rows.shape[1]} bytes cannot begin with float32 each; use a multiple of 4"
        )
    if not longest:
        return
    if chosen(x.device) == "numba":  # one call for all chunks, since a call takes as long as a small chunk
        twin("quantise", "encode_each", x.device)(x, edges, bits, bucket, keys, rows)
        return
    for (a, b), (k0, k1), row in zip(pairwise(edges), keys.tolist(), rows, strict=True):
        heads = 4 * _buckets(b - a, bucket)
        norms = torch.empty(heads // 4, dtype=torch.float32, device=x.device)  # a row may begin at any byte
        codes = row[heads : heads + quantise_bytes(b - a, bits)]
        quantise_encode(x[a:b], bits, bucket, norms, (k0, k1), codes, measure=True)
        row[:heads].copy_(norms.view(torch.uint8))


def quantise_accumulate_each(rows: Tensor, bits: int, bucket: int, out: Tensor) -> None:
    """`quantise_decode` with weight 1 of every row, in their order: norms and codes as `quantise_each` writes them."""
    require_vector("out", out)
    heads = 4 * _buckets(out.numel(), bucket)
    end = heads + quantise_bytes(out.numel(), bits)
    _require_rows(rows, len(rows), end)
    if not end:
        return
    norms = _said(bits, rows[:, :heads].clone(memory_format=torch.contiguous_format).view(torch.float32))
    if chosen(out.device) == "numba":
        twin("quantise", "read_each", out.device)(rows, bits, bucket, norms, out)
        return
    read = twin("quantise", "read", out.device)
    for row, norm in zip(rows, norms, strict=True):
        read(row[heads:end], bits, bucket, norm, 1.0, out, False)


def _require_rows(rows: Tensor, count: int, width: int) -> None:
    if rows.dtype != torch.uint8:
        raise TypeError(f"rows must be uint8, got {rows.dtype}")
    if rows.dim() != 2 or len(rows) != count or rows.shape[1] < width or not rows.is_contiguous():
        raise ValueError(f"there must be {count} contiguous rows of {width} bytes or more, got {tuple(rows.shape)}")


def _said(bits: int, norms: Tensor) -> Tensor:
    """Norms as they are read. One bit has no code for zero: of a bucket too small for any other, codes are a coin's."""
    return norms.masked_fill(norms < layout.TINY, 0.0) if bits == 1 else norms


def _buckets(n: int, bucket: int) -> int:
    _require_bucket(bucket)
    return -(-n // bucket)


def _require_bucket(bucket: int) -> None:
    if bucket < 1:
        raise ValueError(f"bucket must be at least 1, got {bucket}")
