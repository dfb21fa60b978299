"""Elias and Fano's code of places: all rows at once, bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.kernels.layout import Places


def encode(places: Tensor, form: Places) -> Tensor:
    rows, device = places.shape[0], places.device
    bits = torch.zeros(rows, 8 * form.row_bytes, dtype=torch.uint8, device=device)
    low = bits[:, : form.low_bits].view(rows, form.keep, form.low) if form.low else bits
    for bit in range(form.low):
        low[:, :, bit] = (places >> bit) & 1
    ones = form.low_bits + (places >> form.low) + torch.arange(form.keep, device=device)
    bits.scatter_(1, ones, 1)
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    return (bits.view(-1, 8) << shifts).sum(1, dtype=torch.uint8)


def decode(wire: Tensor, form: Places) -> Tensor:
    rows, device = wire.numel() // form.row_bytes, wire.device
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    bits = ((wire[:, None] >> shifts) & 1).view(rows, -1)
    counted = bits[:, form.low_bits :].cumsum(1, dtype=torch.int32)
    wanted = torch.arange(1, form.keep + 1, dtype=torch.int32, device=device)
    ones = torch.searchsorted(counted, wanted.expand(rows, form.keep).contiguous())
    places = (ones - torch.arange(form.keep, device=device)) << form.low
    for bit in range(form.low):
        places |= bits[:, bit : form.low_bits : form.low].long() << bit
    ascending = (places[:, 1:] > places[:, :-1]).all(1)
    sound = (counted[:, -1] == form.keep) & ascending & (places[:, -1] < form.n)
    return places.masked_fill(~sound[:, None], form.n)
