"""Elias and Fano's code of places: all rows at once."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.kernels.layout import Places


def encode(places: Tensor, form: Places) -> Tensor:
    rows, device = places.shape[0], places.device
    bits = torch.zeros(rows, 8 * form.row_bytes, dtype=torch.uint8, device=device)
    if form.low:
        low = (places[:, :, None] >> torch.arange(form.low, device=device)) & 1
        bits[:, : form.low_bits] = low.view(rows, -1)
    ones = (places >> form.low) + torch.arange(form.low_bits, form.low_bits + form.keep, device=device)
    bits.scatter_(1, ones, 1)
    return (bits.view(-1, 8) << _eight(device)).sum(1, dtype=torch.uint8)


def decode(wire: Tensor, form: Places) -> Tensor:
    rows, device = wire.numel() // form.row_bytes, wire.device
    bits = ((wire[:, None] >> _eight(device)) & 1).view(rows, -1)
    counted = bits[:, form.low_bits :].cumsum(1, dtype=torch.int32)
    order = torch.arange(form.keep, dtype=torch.int32, device=device).expand(rows, -1).contiguous()
    places = (torch.searchsorted(counted, order, right=True) - order) << form.low
    if form.low:
        low = bits[:, : form.low_bits].view(rows, form.keep, form.low).long()
        places += (low << torch.arange(form.low, device=device)).sum(2)
    sound = (counted[:, -1] == form.keep) & (places[:, 1:] > places[:, :-1]).all(1) & (places[:, -1] < form.n)
    return places.masked_fill(~sound[:, None], form.n)


def _eight(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
