"""Elias and Fano's code of places: a program writes a row, or a stretch of a long one, or reads a row.

Bits are numbered through the whole wire, and written by atomic "or" of 32-bit words, whose order does not matter. Reading finds
the i-th one of a row by a running count, and each one finds its own low bits.
"""

# Triton's language is not typed Python.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.gpu import OPTIONS
from gossamer.kernels.layout import Places
from gossamer.kernels.reference import places as reference

_STRETCH = 1024  # places that a program writes, and bits of high parts that it reads, at most
_LOW = 31  # low bits that fit, moved to any bit of a word, into a signed number of 64


def encode(places: Tensor, form: Places) -> Tensor:
    if form.low > _LOW:
        return reference.encode(places, form)
    rows, length = places.shape[0], places.shape[0] * form.row_bytes
    words = torch.zeros(triton.cdiv(length, 4), dtype=torch.int32, device=places.device)
    columns = min(max(triton.next_power_of_2(form.keep), 16), _STRETCH)
    grid = (rows * triton.cdiv(form.keep, columns),)
    _encode[grid](places, words, form.keep, form.n, form.low, columns, num_warps=_warps(columns), **OPTIONS)
    return words.view(torch.uint8)[:length]


def decode(wire: Tensor, form: Places) -> Tensor:
    bits = 8 * form.row_bytes - form.low_bits
    if form.low > _LOW or bits > _STRETCH:
        return reference.decode(wire, form)
    rows = wire.numel() // form.row_bytes
    places = torch.empty(rows, form.keep, dtype=torch.int64, device=wire.device)
    columns = max(triton.next_power_of_2(bits), 16)
    _decode[(rows,)](wire, places, form.keep, form.n, form.low, columns, num_warps=_warps(columns), **OPTIONS)
    return places


def _warps(columns: int) -> int:
    """Number of warps; each thread has four elements at most."""
    return min(max(columns // 64, 1), 8)


@triton.jit
def _row_bytes(keep, n, LOW: tl.constexpr):
    """As `layout.Places.row_bytes`, of a row that is written."""
    return (tl.full([], LOW + 1, tl.int64) * keep + ((n - 1) >> LOW) + 7) >> 3


@triton.jit
def _encode(places, words, keep, n, LOW: tl.constexpr, COLUMNS: tl.constexpr):
    """Low bits of each place may lie in two words; the one that says its high part lies in one."""
    parts = (keep + COLUMNS - 1) // COLUMNS
    row = (tl.program_id(0) // parts).to(tl.int64)
    column = (tl.program_id(0) % parts) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < keep
    place = tl.load(places + row * keep + column, mask=inside, other=0)
    begin = 8 * row * _row_bytes(keep, n, LOW)
    at = begin + column.to(tl.int64) * LOW
    both = (place & ((1 << LOW) - 1)) << (at & 31)
    first, second = both.to(tl.int32), (both >> 32).to(tl.int32)
    tl.atomic_or(words + (at >> 5), first, mask=inside & (first != 0), sem="relaxed")
    tl.atomic_or(words + (at >> 5) + 1, second, mask=inside & (second != 0), sem="relaxed")
    one = begin + tl.full([], LOW, tl.int64) * keep + (place >> LOW) + column
    bit = tl.full([], 1, tl.int32) << (one & 31).to(tl.int32)
    tl.atomic_or(words + (one >> 5), bit, mask=inside, sem="relaxed")


@triton.jit
def _decode(wire, places, keep, n, LOW: tl.constexpr, COLUMNS: tl.constexpr):
    """All bits of a row's high parts; a row that is not `keep` strictly ascending places holds n."""
    length = _row_bytes(keep, n, LOW)
    place = tl.arange(0, COLUMNS)
    inside = place < 8 * length - keep * LOW
    start, out = wire + tl.program_id(0) * length, places + tl.program_id(0).to(tl.int64) * keep
    one = _bit(start, keep * LOW + place, inside)
    after = _bit(start, keep * LOW + place - 1, inside & (place > 0))  # the bit before it
    number = tl.cumsum(one, 0) - 1  # which of the row's places a one says
    said = inside & (one == 1) & (number < keep)
    low = _low(start, number, length, said, LOW)
    low_before = _low(start, number - 1, length, said & (after == 1), LOW)  # of the place with the same high part
    found = ((place - number).to(tl.int64) << LOW) | low
    wrong = said & ((found >= n) | ((after == 1) & (low <= low_before)))
    faults = tl.zeros_like(place) + tl.max(wrong.to(tl.int32), 0) + (tl.sum(one, 0) != keep).to(tl.int32)
    tl.store(out + number, found, mask=said & (faults == 0))
    tl.store(out + place, tl.zeros_like(found) + n, mask=(place < keep) & (faults > 0))


@triton.jit
def _bit(start, at, inside):
    return (tl.load(start + (at >> 3), mask=inside, other=0).to(tl.int32) >> (at & 7)) & 1


@triton.jit
def _low(start, number, length, said, LOW: tl.constexpr):
    """The low bits of the place with a number, out of the bytes in which they lie."""
    at = number * LOW
    whole = tl.zeros_like(at).to(tl.int64)
    for byte in tl.static_range((LOW + 14) // 8 if LOW else 0):
        where = (at >> 3) + byte
        part = tl.load(start + where, mask=said & (where < length), other=0).to(tl.int64)
        whole = whole | (part << (8 * byte))
    return (whole >> (at & 7).to(tl.int64)) & ((1 << LOW) - 1)
