"""Places of which the high parts are one number: a program writes a row, or reads one.

A number is a few words of 32 bits in numbers of 64, the lowest first. All of a table's coefficients for a place are compared at
once with what is left of the number: the sign of the highest word that differs outweighs those of the others.
"""

# Triton's language is not typed Python.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.binomials import binomials
from gossamer.kernels.gpu import OPTIONS
from gossamer.kernels.layout import Places
from gossamer.kernels.reference import numbered as reference

_LOW = 31  # low bits that fit, moved to any bit of a word, into a signed number of 64


def encode(places: Tensor, form: Places) -> Tensor:
    if form.low > _LOW:
        return reference.encode(places, form)
    rows, length = places.shape[0], places.shape[0] * form.row_bytes
    words = torch.zeros(triton.cdiv(length, 4), dtype=torch.int32, device=places.device)
    table, sizes = binomials(form, places.device), _sizes(form)
    _encode[(rows,)](
        places, table, words, form.keep, form.most, form.row_bytes, form.low, *sizes, num_warps=4, **OPTIONS
    )
    return words.view(torch.uint8)[:length]


def decode(wire: Tensor, form: Places) -> Tensor:
    if form.low > _LOW:
        return reference.decode(wire, form)
    rows = wire.numel() // form.row_bytes
    places = torch.empty(rows, form.keep, dtype=torch.int64, device=wire.device)
    table, (kept, _, words) = binomials(form, wire.device), _sizes(form)
    columns = max(triton.next_power_of_2(form.most + 1), 16)
    _decode[(rows,)](
        wire, table, places, form.keep, form.n, form.most, form.row_bytes, form.number_bits, form.low, kept, form.words, words, columns,
        num_warps=4, **OPTIONS,
    )  # fmt: skip
    return places


def _sizes(form: Places) -> tuple[int, int, int]:
    """Places, words of a number, and as many words as programs have lanes for."""
    return max(triton.next_power_of_2(form.keep), 16), form.words, triton.next_power_of_2(form.words)


@triton.jit
def _encode(
    places,
    table,
    words,
    keep,
    most,
    length,
    LOW: tl.constexpr,
    KEPT: tl.constexpr,
    WORDS: tl.constexpr,
    LANES: tl.constexpr,
):
    row, column, word = tl.program_id(0).to(tl.int64), tl.arange(0, KEPT), tl.arange(0, LANES)
    inside = column < keep
    place = tl.load(places + row * keep + column, mask=inside, other=0)
    begin = 8 * row * length
    _write(words, begin + column.to(tl.int64) * LOW, place & ((1 << LOW) - 1), inside)
    high = place >> LOW
    if LOW == 0:
        high = high - column
    at = ((column * (most + 1) + high) * WORDS)[:, None] + word[None, :]
    number = tl.sum(tl.load(table + at, mask=inside[:, None] & (word < WORDS)[None, :], other=0), 0)
    for _ in tl.static_range(WORDS - 1):  # each time a carry moves on by a word
        number = (number & 0xFFFFFFFF) + _one_up(number >> 32, word, LANES)
    _write(words, begin + tl.full([], LOW, tl.int64) * keep + 32 * word, number, word < WORDS)


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
def _decode(
    wire, table, places, keep, n, most, length, bits, LOW: tl.constexpr, KEPT: tl.constexpr, WORDS: tl.constexpr,
    LANES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """From the last place to the first; a row that is not `keep` strictly ascending places holds n."""
    start, word, part = wire + tl.program_id(0).to(tl.int64) * length, tl.arange(0, LANES), tl.arange(0, COLUMNS)
    left = _said(start, keep * LOW + 32 * word, length, word < WORDS) & _ones(bits - 32 * word)
    column, known = tl.arange(0, KEPT), (word < WORDS)[None, :] & (part <= most)[:, None]
    found, following, faults = tl.zeros([KEPT], tl.int64), tl.zeros([], tl.int64) + n, tl.zeros([], tl.int32)
    for turn in range(keep):
        j = keep - 1 - turn
        coefficients = tl.load(table + (j * (most + 1) + part)[:, None] * WORDS + word[None, :], mask=known, other=0)
        is_no_larger = (_sign(coefficients - left[None, :], word) <= 0) & (part <= most)
        high = tl.sum(is_no_larger.to(tl.int32), 0) - 1
        left = _less(
            left, tl.load(table + (j * (most + 1) + high) * WORDS + word, mask=word < WORDS, other=0), word, LANES
        )
        if LOW == 0:
            high = high + j
        place = high.to(tl.int64) << LOW
        if LOW > 0:
            place = place | (_scalar(start, j * LOW, length) & ((1 << LOW) - 1))
        faults = faults + (place >= following).to(tl.int32)
        following = place
        found = tl.where(column == j, place, found)
    faults = faults + tl.sum((left != 0).to(tl.int32), 0)
    out = places + tl.program_id(0).to(tl.int64) * keep + column
    tl.store(out, tl.where(faults == 0, found, tl.zeros_like(found) + n), mask=column < keep)


@triton.jit
def _said(start, at, length, inside):
    """32 bits from each of these bits on; beyond the row there are zeros."""
    whole = tl.zeros_like(at).to(tl.int64)
    for byte in tl.static_range(5):
        where = (at >> 3) + byte
        whole = whole | (tl.load(start + where, mask=inside & (where < length), other=0).to(tl.int64) << (8 * byte))
    return (whole >> (at & 7).to(tl.int64)) & 0xFFFFFFFF


@triton.jit
def _scalar(start, at, length):
    whole = tl.zeros([], tl.int64)
    for byte in tl.static_range(5):
        where = (at >> 3) + byte
        whole = whole | (tl.load(start + where, mask=where < length, other=0).to(tl.int64) << (8 * byte))
    return whole >> (at & 7)


@triton.jit
def _ones(bits):
    """As many ones as that, none if it is negative, and no more than 32."""
    bounded = tl.minimum(tl.maximum(bits, 0), 32).to(tl.int64)
    return (tl.zeros_like(bounded) + 1 << bounded) - 1


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
