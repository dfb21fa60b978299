"""Places of which the high parts are one number: all rows at once."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.kernels.layout import Places, binomials

_WORD = 2**32


def encode(places: Tensor, form: Places) -> Tensor:
    rows, device = places.shape[0], places.device
    bits = torch.zeros(rows, 8 * form.row_bytes, dtype=torch.uint8, device=device)
    if form.low:
        low = (places[:, :, None] >> torch.arange(form.low, device=device)) & 1
        bits[:, : form.low_bits] = low.view(rows, -1)
    number = (places >> form.low) - _before(form, device)
    table, order = binomials(form, device), torch.arange(form.keep, device=device)
    words = _carried(table[order, number].sum(1))
    said = (words[:, :, None] >> torch.arange(32, device=device)) & 1
    bits[:, form.low_bits : form.low_bits + form.number_bits] = said.view(rows, -1)[:, : form.number_bits]
    return (bits.view(-1, 8) << _eight(device)).sum(1, dtype=torch.uint8)


def decode(wire: Tensor, form: Places) -> Tensor:
    rows, device = wire.numel() // form.row_bytes, wire.device
    bits = ((wire[:, None] >> _eight(device)) & 1).view(rows, -1).long()
    said = torch.zeros(rows, 32 * form.words, dtype=torch.int64, device=device)
    said[:, : form.number_bits] = bits[:, form.low_bits : form.low_bits + form.number_bits]
    left = (said.view(rows, -1, 32) << torch.arange(32, device=device)).sum(2)
    table, high = binomials(form, device), torch.empty(rows, form.keep, dtype=torch.int64, device=device)
    for j in reversed(range(form.keep)):
        high[:, j] = _largest(table[j], left)
        left = _carried(left - table[j, high[:, j]])
    places = (high + _before(form, device)) << form.low
    if form.low:
        low = bits[:, : form.low_bits].view(rows, form.keep, form.low)
        places += (low << torch.arange(form.low, device=device)).sum(2)
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
    weights = 1 << torch.arange(
        numbers.shape[1], device=numbers.device
    )  # the highest word that differs outweighs the others
    for _ in range((column.shape[0] - 1).bit_length()):
        middle = (low + high + 1) >> 1
        is_above = ((column[middle] - numbers).sign() * weights).sum(1) > 0
        low, high = torch.where(is_above, low, middle), torch.where(is_above, middle - 1, high)
    return low


def _eight(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
