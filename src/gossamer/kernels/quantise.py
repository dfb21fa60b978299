"""Uniform levels with one norm per bucket: codes of 1 to 8 bits, packed as planes of power-of-two widths."""

from __future__ import annotations

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


def quantise_encode(x: Tensor, bits: int, bucket: int, norms: Tensor, key: Key, out: Tensor | None = None) -> Tensor:
    """code = s + floor(x * s / norm + u), clamped to [0, 2 * s], with s = 2 ** (bits - 1) - 1; unbiased.

    The wire is written to `out`, if there is one. One bit has two points: +norm with probability (1 + x / norm) / 2, else -norm;
    a bucket whose norm is below 2^-100 is read as zero, as with more bits.
    u is the top 23 bits of mix3(i). Reads 4 and writes bits / 8 bytes per element.
    """
    wire = uninitialised(quantise_bytes(x.numel(), bits), x.device) if out is None else out
    _encode(x, bits, bucket, norms, key, False, wire)
    return wire


def quantise(x: Tensor, bits: int, bucket: int, key: Key, norms: Tensor, out: Tensor) -> None:
    """`bucket_norms` by magnitude, written to `norms`, and `quantise_encode` with them, written to `out`.

    On a CPU each bucket is read once from memory. Reads 4 and writes bits / 8 bytes per element.
    """
    _encode(x, bits, bucket, norms, key, True, out)


def quantise_accumulate(wire: Tensor, bits: int, bucket: int, norms: Tensor, out: Tensor, weight: float = 1.0) -> None:
    """out += weight * norm / s * (code - s), in place; a bucket whose norm is not finite becomes NaN throughout.

    Reads bits / 8 + 4 and writes 4 bytes per element.
    """
    _read(wire, bits, bucket, norms, out, weight, False)


def quantise_decode(wire: Tensor, bits: int, bucket: int, norms: Tensor, out: Tensor) -> None:
    """out = norm / s * (code - s): to the bit what `quantise_accumulate` adds to zeros, without a pass that writes them."""
    _read(wire, bits, bucket, norms, out, 1.0, True)


def quantise_each(
    x: Tensor, edges: Sequence[int], bits: int, bucket: int, keys: Keys, norms: Tensor, out: Tensor
) -> None:
    """`quantise` of every chunk x[edges[j]:edges[j + 1]] with key j, to the rows of `norms` and `out`.

    A row of `out` is as long as the longest chunk's wire. All chunks have the same number of buckets.
    """
    require_vector("x", x)
    lengths = [b - a for a, b in pairwise(edges)]
    _require_rows(len(lengths), max(lengths), bits, bucket, norms, out)
    if keys.shape != (len(lengths), 2) or min(lengths) < 1 or _buckets(min(lengths), bucket) != norms.shape[1]:
        raise ValueError(
            "quantise_each: every chunk needs a key, an element at least, and as many buckets as the others"
        )
    if edges[0] < 0 or edges[-1] > x.numel():
        raise ValueError(f"quantise_each: chunks lie from {edges[0]} to {edges[-1]}, and x has {x.numel()} elements")
    if chosen(x.device) == "numba":  # one call for all chunks, since a call takes as long as a small chunk
        twin("quantise", "encode_each", x.device)(x, edges, bits, bucket, keys, norms, out)
        return
    for (a, b), norm, (k0, k1), wire in zip(pairwise(edges), norms, keys.tolist(), out, strict=True):
        quantise(x[a:b], bits, bucket, (k0, k1), norm, wire[: quantise_bytes(b - a, bits)])


def quantise_accumulate_each(wires: Tensor, bits: int, bucket: int, norms: Tensor, out: Tensor) -> None:
    """`quantise_accumulate` of every row, in their order, with weight 1."""
    require_vector("out", out)
    _require_rows(len(wires), out.numel(), bits, bucket, norms, wires)
    norms = _said(bits, norms)
    if chosen(out.device) == "numba":
        twin("quantise", "read_each", out.device)(wires, bits, bucket, norms, out)
        return
    read = twin("quantise", "read", out.device)
    for wire, norm in zip(wires, norms, strict=True):
        read(wire, bits, bucket, norm, 1.0, out, False)


def _require_rows(count: int, n: int, bits: int, bucket: int, norms: Tensor, wires: Tensor) -> None:
    wanted = (count, _buckets(n, bucket)), (count, quantise_bytes(n, bits))
    if (norms.shape, wires.shape) != wanted or not (norms.is_contiguous() and wires.is_contiguous()):
        raise ValueError(f"norms and wires must be contiguous rows of shapes {wanted}")
    if norms.dtype != torch.float32 or wires.dtype != torch.uint8:
        raise TypeError(f"norms must be float32 and wires uint8, got {norms.dtype} and {wires.dtype}")


def _encode(x: Tensor, bits: int, bucket: int, norms: Tensor, key: Key, measure: bool, out: Tensor) -> None:
    require_vector("x", x)
    require_vector("norms", norms)
    require_count("norms", norms, _buckets(x.numel(), bucket))
    require_length(f"quantise {bits} bits", out, quantise_bytes(x.numel(), bits))
    twin("quantise", "encode", x.device)(x, bits, bucket, norms, key, measure, out)


def _read(wire: Tensor, bits: int, bucket: int, norms: Tensor, out: Tensor, weight: float, anew: bool) -> None:
    require_vector("out", out)
    require_count("norms", norms, _buckets(out.numel(), bucket))
    require_length(f"quantise {bits} bits", wire, quantise_bytes(out.numel(), bits))
    twin("quantise", "read", out.device)(wire, bits, bucket, _said(bits, norms), weight, out, anew)


def _said(bits: int, norms: Tensor) -> Tensor:
    """Norms as they are read. One bit has no code for zero: of a bucket too small for any other, codes are a coin's."""
    return norms.masked_fill(norms < layout.TINY, 0.0) if bits == 1 else norms


def _buckets(n: int, bucket: int) -> int:
    _require_bucket(bucket)
    return -(-n // bucket)


def _require_bucket(bucket: int) -> None:
    if bucket < 1:
        raise ValueError(f"bucket must be at least 1, got {bucket}")
