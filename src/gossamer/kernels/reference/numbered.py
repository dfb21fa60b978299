"""Places of which the high parts are one number: all rows at once."""

import torch
from torch import Tensor

from gossamer.kernels.layout import Places, binomials
from gossamer.kernels.reference.places import with_low, write_low
from gossamer.kernels.reference.planes import to_bits, to_bytes

_WORD = 2**32


def encode(places: Tensor, form: Places) -> Tensor:
    rows, device = places.shape[0], places.device
    bits = torch.zeros(rows, 8 * form.row_bytes, dtype=torch.uint8, device=device)
    write_low(places, form, bits)
    number = (places >> form.low) - _before(form, device)
    table, order = binomials(form, device), torch.arange(form.keep, device=device)
    words = _carried(table[order, number].sum(1))
    said = (words[:, :, None] >> torch.arange(32, device=device)) & 1
    bits[:, form.low_bits : form.low_bits + form.number_bits] = said.view(rows, -1)[:, : form.number_bits]
    return to_bytes(bits)


def decode(wire: Tensor, form: Places) -> Tensor:
    rows, device = wire.numel() // form.row_bytes, wire.device
    bits = to_bits(wire).view(rows, -1).long()
    said = torch.zeros(rows, 32 * form.words, dtype=torch.int64, device=device)
    said[:, : form.number_bits] = bits[:, form.low_bits : form.low_bits + form.number_bits]
    left = (said.view(rows, -1, 32) << torch.arange(32, device=device)).sum(2)
    table, high = binomials(form, device), torch.empty(rows, form.keep, dtype=torch.int64, device=device)
    for j in reversed(range(form.keep)):
        high[:, j] = _largest(table[j], left)
        left = _carried(left - table[j, high[:, j]])
    places = with_low(high + _before(form, device), form, bits)
    is_sound = (left == 0).all(1) & (places[:, 1:] > places[:, :-1]).all(1) & (places[:, -1] < form.n)
    return places.masked_fill(~is_sound[:, None], form.n)


def _before(form: Places, device: torch.device) -> Tensor:
    """Places before each one, which are left out of what is counted where no two have the same high part."""
    return torch.arange(form.keep, device=device) * (form.low == 0)


def _carried(words: Tensor) -> Tensor:
    """The same numbers with words from 0 to 2^32 - 1."""
    words = words.clone()
    for i in range(words.shape[1] - 1):
        words[:, i + 1] += words[:, i] >> 32
        words[:, i] %= _WORD
    return words


def _largest(column: Tensor, numbers: Tensor) -> Tensor:
    """The last row of an ascending column that is no larger than each number: halving what it may be."""
    low = torch.zeros(numbers.shape[0], dtype=torch.int64, device=numbers.device)
    high = low + column.shape[0] - 1
    # The highest word that differs outweighs the others.
    weights = 1 << torch.arange(numbers.shape[1], device=numbers.device)
    for _ in range((column.shape[0] - 1).bit_length()):
        middle = (low + high + 1) >> 1
        is_above = ((column[middle] - numbers).sign() * weights).sum(1) > 0
        low, high = torch.where(is_above, low, middle), torch.where(is_above, middle - 1, high)
    return low
