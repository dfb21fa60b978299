"""Elias and Fano's code of places: all rows at once."""

import torch
from torch import Tensor

from gossamer.kernels.layout import Places
from gossamer.kernels.reference.planes import to_bits, to_bytes


def encode(places: Tensor, form: Places) -> Tensor:
    rows, device = places.shape[0], places.device
    bits = torch.zeros(rows, 8 * form.row_bytes, dtype=torch.uint8, device=device)
    write_low(places, form, bits)
    ones = (places >> form.low) + torch.arange(form.low_bits, form.low_bits + form.keep, device=device)
    bits.scatter_(1, ones, 1)
    return to_bytes(bits)


def decode(wire: Tensor, form: Places) -> Tensor:
    rows, device = wire.numel() // form.row_bytes, wire.device
    bits = to_bits(wire).view(rows, -1)
    counted = bits[:, form.low_bits :].cumsum(1, dtype=torch.int32)
    order = torch.arange(form.keep, dtype=torch.int32, device=device).expand(rows, -1).contiguous()
    places = with_low(torch.searchsorted(counted, order, right=True) - order, form, bits)
    sound = (counted[:, -1] == form.keep) & (places[:, 1:] > places[:, :-1]).all(1) & (places[:, -1] < form.n)
    return places.masked_fill(~sound[:, None], form.n)


def write_low(places: Tensor, form: Places, bits: Tensor) -> None:
    """Write the low bits of each place to the front of its row."""
    if form.low:
        low = (places[:, :, None] >> torch.arange(form.low, device=places.device)) & 1
        bits[:, : form.low_bits] = low.view(places.shape[0], -1)


def with_low(high: Tensor, form: Places, bits: Tensor) -> Tensor:
    """The places with these high parts, and the low bits that stand at the front of each row."""
    places = high << form.low
    if form.low:
        low = bits[:, : form.low_bits].view(-1, form.keep, form.low).long()
        places += (low << torch.arange(form.low, device=bits.device)).sum(2)
    return places
