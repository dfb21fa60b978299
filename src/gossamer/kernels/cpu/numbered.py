"""Places of which the high parts are one number: row after row, place after place."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossamer.kernels.cpu.compile import Bytes, Longs, Rows, kernel
from gossamer.kernels.cpu.places import Table, read_low, write_low
from gossamer.kernels.layout import Places, binomials

Coefficients = npt.NDArray[np.int64]  # three dimensions: (places, high parts, words)
_WORD = 2**32


def encode(places: Tensor, form: Places) -> Tensor:
    wire = torch.zeros(places.shape[0], form.row_bytes, dtype=torch.uint8)
    table = binomials(form, places.device).numpy()
    _write(places.numpy(), form.low, table, wire.numpy())
    return wire.view(-1)


def decode(wire: Tensor, form: Places) -> Tensor:
    rows = wire.view(-1, form.row_bytes)
    places = torch.empty(rows.shape[0], form.keep, dtype=torch.int64)
    _read(rows.numpy(), form.low, form.number_bits, form.n, binomials(form, wire.device).numpy(), places.numpy())
    return places


@kernel
def _write(places: Table, low: int, table: Coefficients, rows: Rows) -> None:
    keep, words = places.shape[1], table.shape[2]
    number = np.zeros(words, dtype=np.int64)
    for r in range(places.shape[0]):
        row = rows[r]
        number[:] = 0
        for i in range(keep):
            place = places[r, i]
            write_low(place, i, low, row)
            number += table[i, (place >> low) - (0 if low else i)]
        for word in range(words - 1):
            number[word + 1] += number[word] >> 32
            number[word] &= _WORD - 1
        for bit in range(8 * row.size - keep * low):
            at = keep * low + bit
            if bit < 32 * words:
                row[at >> 3] |= np.uint8(((number[bit >> 5] >> (bit & 31)) & 1) << (at & 7))


@kernel
def _read(rows: Rows, low: int, bits: int, n: int, table: Coefficients, places: Table) -> None:
    number = np.zeros(table.shape[2], dtype=np.int64)
    for r in range(rows.shape[0]):
        number[:] = 0
        for bit in range(bits):
            at = places.shape[1] * low + bit
            number[bit >> 5] |= np.int64((rows[r, at >> 3] >> (at & 7)) & 1) << (bit & 31)
        if not _read_row(rows[r], low, n, number, table, places[r]):
            places[r, :] = n


@kernel
def _read_row(row: Bytes, low: int, n: int, number: Longs, table: Coefficients, places: Longs) -> bool:
    """False if these are not as many strictly ascending places below n. Nothing is left of the number."""
    following = n
    for i in range(places.size - 1, -1, -1):
        high = _largest(table[i], number)
        _subtract(number, table[i, high])
        place = ((high + (0 if low else i)) << low) | read_low(i, low, row)
        if not place < following:
            return False
        places[i] = following = place
    return not np.any(number)


@kernel
def _largest(column: Table, number: Longs) -> int:
    """The last row of an ascending column that is no larger than the number."""
    low, high = 0, column.shape[0] - 1
    while low < high:
        middle = (low + high + 1) >> 1
        if _is_above(column[middle], number):
            high = middle - 1
        else:
            low = middle
    return low


@kernel
def _is_above(one: Longs, other: Longs) -> bool:
    for word in range(one.size - 1, -1, -1):
        if one[word] != other[word]:
            return one[word] > other[word]
    return False


@kernel
def _subtract(number: Longs, less: Longs) -> None:
    borrowed = 0
    for word in range(number.size):
        number[word] -= less[word] + borrowed
        borrowed = 1 if number[word] < 0 else 0
        number[word] += borrowed * _WORD
