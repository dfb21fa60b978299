"""Magnitude and deviation per segment."""

import numpy as np
import torch
from torch import Tensor

from gossamer.kernels.cpu.compile import Doubles, Floats, Ints, Longs, inlined, kernel, prefetch, reduction, wide
from gossamer.kernels.layout import Bounds, edges

_CHUNK = 2048


def absmax(x: Tensor, bounds: Bounds) -> Tensor:
    out = torch.empty(len(bounds) - 1, dtype=torch.float32)
    _absmax(x.detach().numpy().view(np.int32), edges(bounds), out.numpy().view(np.int32))
    return out


def divide(x: Tensor, by: int) -> Tensor:
    out, values = torch.empty(1, dtype=torch.float32), x.detach().numpy()
    _divide(values, values.view(np.int32), *divisor(by), out.numpy().view(np.int32))
    return out


def divisor(by: int) -> tuple[np.float32, bool]:
    """The divisor and False; for a power of two its reciprocal and True: multiplying is exact then, and faster."""
    exact = by & (by - 1) == 0
    return np.float32(1.0 / by if exact else by), exact


def absmax_and_rms(x: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    top, rms = torch.empty(2, len(bounds) - 1, dtype=torch.float32)
    values = x.detach().numpy()
    _absmax_and_rms(values, values.view(np.int32), edges(bounds), top.numpy().view(np.int32), rms.numpy())
    return top, rms


def absmax_and_std(x: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    top, std = torch.empty(2, len(bounds) - 1, dtype=torch.float32)
    values = x.detach().numpy()
    _absmax_and_std(values, values.view(np.int32), edges(bounds), top.numpy().view(np.int32), std.numpy())
    return top, std


@kernel
def top_bits(bits: Ints) -> np.int32:
    """Integer maximum of the magnitude bits: it vectorises, and carries NaN."""
    top = np.int32(0)
    for j in range(bits.size):
        magnitude = np.int32(bits[j] & np.int32(0x7FFFFFFF))
        if magnitude > top:
            top = magnitude
    return top


@kernel
def top_between(bits: Ints, a: int, b: int) -> np.int32:
    """The same of a range: a slice would count references."""
    wide()
    inlined()
    top = np.int32(0)
    for j in range(b - a):
        magnitude = np.int32(bits[np.uint64(a + j)] & np.int32(0x7FFFFFFF))
        top = magnitude if magnitude > top else top
    return top


@kernel
def piece(edges: Longs, segment: int, begin: int, stop: int) -> tuple[int, int, int]:
    """The segment of an element, and the part of it that lies in [begin, stop): (segment, begin, end).

    The search starts at a segment that does not lie behind the element, such as that of the piece before.
    """
    inlined()
    while edges[segment + 1] <= begin:
        segment += 1
    return segment, begin, min(stop, edges[segment + 1])


@kernel
def _absmax(bits: Ints, edges: Longs, out: Ints) -> None:
    for i in range(out.size):
        out[i] = top_bits(bits[edges[i] : edges[i + 1]])


@kernel
def _divide(x: Floats, bits: Ints, number: np.float32, exact: bool, out: Ints) -> None:
    best = np.int32(0)
    for lo in range(0, x.size, _CHUNK):
        hi = min(lo + _CHUNK, x.size)
        prefetch(x, hi, hi + _CHUNK)
        divide_all(x[lo:hi], number, exact)
        best = max(best, top_bits(bits[lo:hi]))
    out[0] = best


@kernel
def divide_all(x: Floats, number: np.float32, exact: bool) -> None:
    wide()
    if exact:
        for j in range(x.size):
            x[j] *= number
    else:
        for j in range(x.size):
            x[j] /= number


@kernel
def _absmax_and_rms(x: Floats, bits: Ints, edges: Longs, top: Ints, rms: Floats) -> None:
    for i in range(top.size):
        a, b = edges[i], edges[i + 1]
        top[i], rms[i] = top_and_rms(x[a:b], bits[a:b])


@kernel
def top_and_rms(x: Floats, bits: Ints) -> tuple[np.int32, np.float32]:
    """max |x| and root mean square of one segment, in stretches that stay in L1."""
    total = np.zeros(1, np.float64)
    best = np.int32(0)
    for lo in range(0, x.size, _CHUNK):
        hi = min(lo + _CHUNK, x.size)
        best = max(best, top_bits(bits[lo:hi]))
        _squares(x[lo:hi], total)
    return best, np.float32(np.sqrt(total[0] / max(x.size, 1)))


@reduction
def _squares(x: Floats, total: Doubles) -> None:
    wide()
    first = 0.0
    for j in range(x.size):
        first += np.float64(x[j]) * np.float64(x[j])
    total[0] += first


@kernel
def _absmax_and_std(x: Floats, bits: Ints, edges: Longs, top: Ints, std: Floats) -> None:
    sums = np.empty(2, np.float64)
    for i in range(top.size):
        a, b = edges[i], edges[i + 1]
        sums[:] = 0.0
        best = np.int32(0)
        for lo in range(a, b, _CHUNK):
            hi = min(lo + _CHUNK, b)
            best = max(best, top_bits(bits[lo:hi]))
            _moments(x[lo:hi], np.float64(x[a]), sums)
        top[i] = best
        n = max(b - a, 1)
        variance = (sums[1] - sums[0] * sums[0] / n) / n
        # written so that NaN passes and a rounding error below zero does not
        std[i] = np.float32(0.0) if variance < 0.0 else np.float32(np.sqrt(variance))


@reduction
def _moments(x: Floats, pivot: float, sums: Doubles) -> None:
    """Adds sum(x - pivot) and sum((x - pivot) ** 2)."""
    wide()
    first, second = 0.0, 0.0
    for j in range(x.size):
        d = np.float64(x[j]) - pivot
        first += d
        second += d * d
    sums[0] += first
    sums[1] += second
