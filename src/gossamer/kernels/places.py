"""Places in rows: of each row equally many elements are kept, and their places travel with a length that is known.

A place is cut in two. Its low bits are written as they are, place after place. The high parts of all places are a row of bits, with
a one for the i-th at position h + i (Elias and Fano's code): ones are as many as places, and zeros count the high parts. Or,
where that is shorter and at most 256 bits, they are one number: the number of this set among all sets that could be (Cover's
code). The low bits are as many as make a row shortest. 64 places of 4096 take 483 bits, 7.6 each (as a row of bits 511; a bound is
7.4). So the length is known without the data. A row ends on a byte; bits are numbered from the lowest of each. Where all
places are kept, nothing is written.

Papers: Elias, Efficient Storage and Retrieval by Content and Address of Static Files, 1974; Fano, 1971; Cover, Enumerative Source
Encoding, 1973.
"""

import torch
from torch import Tensor

from gossamer.kernels.backends import twin
from gossamer.kernels.layout import CorruptWire, Places, require_length


def place_bytes(keep: int, n: int) -> int:
    """Bytes of one row: `keep` of the places from 0 to n - 1.

    >>> place_bytes(64, 4096), place_bytes(64, 64)
    (61, 0)
    """
    return Places(keep, n).row_bytes


def places_encode(places: Tensor, n: int) -> Tensor:
    """Rows (two dimensions, int64) of strictly ascending places in [0, n), as bytes. Reads 8 and writes about 1 byte a place."""
    form = Places(places.shape[1], n)
    if not form.row_bytes or not places.numel():
        return torch.empty(0, dtype=torch.uint8, device=places.device)
    return twin(_family(form), "encode", places.device)(places.contiguous(), form)


def places_decode(wire: Tensor, rows: int, keep: int, n: int) -> Tensor:
    """The rows of places of a wire. What is no row of strictly ascending places in [0, n) raises CorruptWire on a CPU.

    Elsewhere the host would have to wait for the answer; such a row holds n in every place.
    """
    form = Places(keep, n)
    require_length("places", wire, rows * form.row_bytes)
    if not form.row_bytes or not rows:
        return torch.arange(keep, device=wire.device).expand(rows, keep)
    places: Tensor = twin(_family(form), "decode", wire.device)(wire, form)
    if wire.device.type == "cpu" and int(places.max()) == n:
        raise CorruptWire(f"places: a row is not {keep} strictly ascending places in [0, {n})")
    return places


def _family(form: Places) -> str:
    return "numbered" if form.number_bits else "places"
