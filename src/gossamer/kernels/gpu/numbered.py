"""Places of which the high parts are one number: a program writes a row, or reads one.

A number is a few words of 32 bits in numbers of 64, the lowest first. All of a table's coefficients for a place are compared at
once with what is left of the number: the sign of the highest word that differs outweighs those of the others.
"""

# Triton's language is not typed Python.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportReturnType=false
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.gpu import OPTIONS
from gossamer.kernels.layout import Places, binomials
from gossamer.kernels.reference import numbered as reference

_LOW = 31  # low bits that fit, moved to any bit of a word, into a signed number of 64
_LANES = 8  # words of the longest number
_HEAD = tl.constexpr(8)  # numbers before a table


def encode(places: Tensor, form: Places) -> Tensor:
    if form.low > _LOW:
        return reference.encode(places, form)
    rows, length = places.shape[0], places.shape[0] * form.row_bytes
    words = torch.zeros(triton.cdiv(length, 4), dtype=torch.int32, device=places.device)
    table = _table(form, places.device)
    _encode[(rows,)](places, table, words, form.low, _size(form.keep), _LANES, num_warps=4, **OPTIONS)
    return words.view(torch.uint8)[:length]


def decode(wire: Tensor, form: Places) -> Tensor:
    if form.low > _LOW:
        return reference.decode(wire, form)
    rows = wire.numel() // form.row_bytes
    places = torch.empty(rows, form.keep, dtype=torch.int64, device=wire.device)
    table, size = _table(form, wire.device), max(_size(form.keep), _size(form.most + 1))
    _decode[(rows,)](wire, table, places, form.low, size, _LANES, num_warps=4, **OPTIONS)
    return places


def _size(count: int) -> int:
    return max(triton.next_power_of_2(count), 16)


@lru_cache(maxsize=64)
def _table(form: Places, device: torch.device) -> Tensor:
    """What programs must know of the form, and the table with as many words of each number as there are lanes."""
    known = torch.tensor([form.keep, form.n, form.most, form.row_bytes, form.number_bits, 0, 0, 0], device="cpu")
    words = torch.nn.functional.pad(binomials(form, torch.device("cpu")), (0, _LANES - form.words))
    return torch.cat([known, words.view(-1)]).to(device)


@triton.jit
def _encode(places, table, words, LOW: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr):
    keep, most, length = tl.load(table), tl.load(table + 2), tl.load(table + 3)
    row, column, word = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE), tl.arange(0, LANES)
    inside = column < keep
    place = tl.load(places + row * keep + column, mask=inside, other=0)
    begin = 8 * row * length
    _write(words, begin + column.to(tl.int64) * LOW, place & ((1 << LOW) - 1), inside)
    high = place >> LOW
    if LOW == 0:
        high = high - column
    at = ((column * (most + 1) + high) * LANES)[:, None] + word[None, :]
    number = tl.sum(tl.load(table + _HEAD + at, mask=inside[:, None], other=0), 0)
    for _ in tl.static_range(LANES - 1):  # each time a carry moves on by a word
        number = (number & 0xFFFFFFFF) + _one_up(number >> 32, word, LANES)
    _write(words, begin + keep * LOW + 32 * word, number, word < LANES)


@triton.jit
def _write(words, at, value, inside):
    """Up to 32 bits that may lie in two words."""
    both = value << (at & 31)
    first, second = both.to(tl.int32), (both >> 32).to(tl.int32)
    tl.atomic_or(words + (at >> 5), first, mask=inside & (first != 0), sem="relaxed")
    tl.atomic_or(words + (at >> 5) + 1, second, mask=inside & (second != 0), sem="relaxed")


@triton.jit
def _one_up(values, word, LANES: tl.constexpr):
    """Every lane has the value of the lane before it."""
    is_before = tl.arange(0, LANES)[:, None] + 1 == word[None, :]
    return tl.sum(tl.where(is_before, values[:, None], 0), 0)


@triton.jit
def _decode(wire, table, places, LOW: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr):
    """From the last place to the first; a row that is not as many strictly ascending places below n holds n."""
    keep, n, most, length = tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3)
    start, word, part = wire + tl.program_id(0) * length, tl.arange(0, LANES), tl.arange(0, SIZE)
    left = _said(start, keep * LOW + 32 * word, length) & _ones(tl.load(table + 4) - 32 * word)
    found, following, faults = tl.zeros([SIZE], tl.int64), n, tl.zeros([], tl.int32)
    for turn in range(keep):
        j = keep - 1 - turn
        column = table + _HEAD + j * (most + 1) * LANES
        coefficients = tl.load(column + part[:, None] * LANES + word[None, :], mask=(part <= most)[:, None], other=0)
        is_no_larger = (_sign(coefficients - left[None, :], word) <= 0) & (part <= most)
        high = tl.sum(is_no_larger.to(tl.int64), 0) - 1
        left = _less(left, tl.load(column + high * LANES + word), word, LANES)
        if LOW == 0:
            high = high + j
        place = high << LOW
        if LOW > 0:
            place = place | (_said(start, j * LOW, length) & ((1 << LOW) - 1))
        faults = faults + (place >= following).to(tl.int32)
        following = place
        found = tl.where(part == j, place, found)
    faults = faults + tl.sum((left != 0).to(tl.int32), 0)
    out = places + tl.program_id(0).to(tl.int64) * keep + part
    tl.store(out, tl.where(faults == 0, found, tl.zeros_like(found) + n), mask=part < keep)


@triton.jit
def _said(start, at, length):
    """32 bits from each of these bits on; beyond the row there are zeros."""
    whole = at - at
    for byte in tl.static_range(5):
        where = (at >> 3) + byte
        whole = whole | (tl.load(start + where, mask=where < length, other=0).to(tl.int64) << (8 * byte))
    return (whole >> (at & 7)) & 0xFFFFFFFF


@triton.jit
def _ones(bits):
    """As many ones as that, none if it is negative, and no more than 32."""
    bounded = tl.minimum(tl.maximum(bits, 0), 32)
    return ((bounded - bounded + 1) << bounded) - 1


@triton.jit
def _sign(difference, word):
    """Of numbers whose words differ by so much: of the highest word that does."""
    sign = (difference > 0).to(tl.int32) - (difference < 0).to(tl.int32)
    return tl.sum(sign << word[None, :], 1)


@triton.jit
def _less(number, other, word, LANES: tl.constexpr):
    """The difference of two numbers, of which the first is no smaller."""
    difference = number - other
    sign = ((difference > 0).to(tl.int32) - (difference < 0).to(tl.int32)) << word
    is_below = tl.arange(0, LANES)[:, None] < word[None, :]
    borrowed = (tl.sum(tl.where(is_below, sign[:, None], 0), 0) < 0).to(tl.int64)
    difference = difference - borrowed
    return tl.where(difference < 0, difference + 4294967296, difference)
