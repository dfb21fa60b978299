"""Elias and Fano's code of places: row after row, place after place."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossamer.kernels.cpu.compile import Bytes, Rows, inlined, kernel
from gossamer.kernels.layout import Places

Table = npt.NDArray[np.int64]  # two dimensions: (rows, places)


def encode(places: Tensor, form: Places) -> Tensor:
    wire = torch.zeros(places.shape[0], form.row_bytes, dtype=torch.uint8)
    _write(places.numpy(), form.low, wire.numpy())
    return wire.view(-1)


def decode(wire: Tensor, form: Places) -> Tensor:
    rows = wire.view(-1, form.row_bytes)
    places = torch.empty(rows.shape[0], form.keep, dtype=torch.int64)
    _read(rows.numpy(), form.low, form.n, places.numpy())
    return places


@kernel
def write_low(place: int, i: int, low: int, row: Bytes) -> None:
    """Write the low bits of the i-th place to the front of a row."""
    inlined()
    for bit in range(low):
        at = i * low + bit
        row[at >> 3] |= np.uint8(((place >> bit) & 1) << (at & 7))


@kernel
def read_low(i: int, low: int, row: Bytes) -> np.int64:
    inlined()
    bits = np.int64(0)
    for bit in range(low):
        at = i * low + bit
        bits |= np.int64((row[at >> 3] >> (at & 7)) & 1) << bit
    return bits


@kernel
def _write(places: Table, low: int, rows: Rows) -> None:
    keep = places.shape[1]
    for r in range(places.shape[0]):
        row = rows[r]
        for i in range(keep):
            place = places[r, i]
            write_low(place, i, low, row)
            at = keep * low + (place >> low) + i
            row[at >> 3] |= np.uint8(1 << (at & 7))


@kernel
def _read(rows: Rows, low: int, n: int, places: Table) -> None:
    for r in range(rows.shape[0]):
        if not _read_row(rows[r], low, n, places[r]):
            places[r, :] = n


@kernel
def _read_row(row: Bytes, low: int, n: int, places: npt.NDArray[np.int64]) -> bool:
    """False if these are not as many strictly ascending places below n."""
    begin, count, before = places.size * low, 0, -1
    for one in range(begin, 8 * row.size):
        if not (row[one >> 3] >> (one & 7)) & 1:
            continue
        if count == places.size:
            return False
        place = ((one - begin - count) << low) | read_low(count, low, row)
        if not before < place < n:
            return False
        places[count] = place
        before, count = place, count + 1
    return count == places.size
