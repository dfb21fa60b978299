"""Places in rows: of each row equally many elements are kept, and their places travel in Elias and Fano's code.

A place is cut in two. Its low bits are written as they are, place after place. Its high part h, of the i-th place, is a one at
position h + i of a row of bits: ones are as many as places, and zeros count the high parts. The low bits are as many as make a row
shortest, which for 64 places of 4096 are 8 bits a place (a bound is 7.4). So the length is known without the data, and of every bit the
position but that of the ones, which counting finds: no walk is needed. A row ends on a byte; bits are numbered from the lowest
of each. Where all places are kept, nothing is written.

Paper: Elias, Efficient Storage and Retrieval by Content and Address of Static Files, 1974; Fano, 1971.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.kernels.backends import twin
from gossamer.kernels.layout import CorruptWire, Places, require_length


def place_bytes(keep: int, n: int) -> int:
    """Bytes of one row: `keep` of the places from 0 to n - 1.

    >>> place_bytes(64, 4096), place_bytes(64, 64)
    (64, 0)
    """
    return Places(keep, n).row_bytes


def places_encode(places: Tensor, n: int) -> Tensor:
    """Rows (two dimensions, int64) of strictly ascending places in [0, n), as bytes. Reads 8 and writes about 1 byte a place."""
    form = Places(places.shape[1], n)
    if not form.row_bytes or not places.numel():
        return torch.empty(0, dtype=torch.uint8, device=places.device)
    return twin("places", "encode", places.device)(places.contiguous(), form)


def places_decode(wire: Tensor, rows: int, keep: int, n: int) -> Tensor:
    """The rows of places of a wire. What is no row of strictly ascending places in [0, n) raises CorruptWire on a CPU.

    Elsewhere the host would have to wait for the answer; such a row holds n in every place.
    """
    form = Places(keep, n)
    require_length("places", wire, rows * form.row_bytes)
    if not form.row_bytes or not rows:
        return torch.arange(keep, device=wire.device).expand(rows, keep)
    places: Tensor = twin("places", "decode", wire.device)(wire, form)
    if wire.device.type == "cpu" and int(places.max()) == n:
        raise CorruptWire(f"places: a row is not {keep} strictly ascending places in [0, {n})")
    return places
