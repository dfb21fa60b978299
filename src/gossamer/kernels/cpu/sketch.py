"""Count sketches: changes the signs of a stretch of a layer in a buffer in L1, and adds it at its row's rotation."""

import numpy as np
from torch import Tensor

from gossamer.kernels.cpu.compile import Floats, kernel, prefetch, wide
from gossamer.kernels.cpu.hashing import Start, fraction, start, word
from gossamer.kernels.cpu.signs import Words, add_signed, middle_of_five
from gossamer.kernels.layout import SIGN_WORDS, SIGNS, Turns

Table = Floats  # two dimensions: (rows, columns)


def add(x: Tensor, turns: Turns, table: Tensor) -> None:
    _add(x.detach().numpy(), turns.layers, turns.first_word, start(turns.key), table.numpy())


def estimate(table: Tensor, turns: Turns, out: Tensor) -> None:
    key = start(turns.key)
    if turns.rows == 5 and turns.columns > SIGN_WORDS:
        said = table.view(-1).numpy()
        _estimate_by_five(said, turns.columns, turns.layers, turns.first_word, key, out.numpy())
        return
    _estimate(table.numpy(), turns.layers, turns.first_word, key, out.numpy())


@kernel
def _add(x: Floats, layers: int, first_word: int, key: Start, table: Table) -> None:
    wide()
    rows, columns = table.shape
    words, signed = np.empty(SIGN_WORDS, np.uint32), np.empty(SIGNS, np.float32)
    for layer in range(layers):
        lo = layer * columns
        size = min(columns, x.size - lo)
        for a in range(0, size, SIGNS):
            n = min(SIGNS, size - a)
            prefetch(x, lo + a + n, lo + a + n + SIGNS)
            near = x[lo + a : lo + a + n]
            for j in range(rows):
                row = j * layers + layer
                _hash(words[:n], _first(first_word, row, columns, a, key), key[1])
                place = _turned(a, row, columns, key)
                if place + n <= columns:
                    _add_signed(near, words, table[j, place : place + n])
                else:
                    _sign(near, words, signed)
                    _plus(signed[: columns - place], table[j, place:])
                    _plus(signed[columns - place : n], table[j, : place + n - columns])


@kernel
def _estimate_by_five(table: Floats, columns: int, layers: int, first_word: int, key: Start, out: Floats) -> None:
    """Like `_estimate`, for five rows: estimates runs of whole words at once where no row wraps around."""
    wide()
    words, some = np.empty(5 * SIGN_WORDS, np.uint32), np.empty(5, np.int64)
    said = np.empty((5, SIGN_WORDS), np.float32)
    for layer in range(layers):
        lo = layer * columns
        size = min(columns, out.size - lo)
        for a in range(0, size, SIGNS):
            for j in range(5):
                row = j * layers + layer
                _hash(words[j * SIGN_WORDS : (j + 1) * SIGN_WORDS], _first(first_word, row, columns, a, key), key[1])
                some[j] = _turned(a, row, columns, key)
            for i in range((min(SIGNS, size - a) + SIGN_WORDS - 1) // SIGN_WORDS):
                n = min(SIGN_WORDS, size - a - i * SIGN_WORDS)
                whole = n == SIGN_WORDS
                for j in range(5):
                    whole &= some[j] + SIGN_WORDS <= columns
                if whole:
                    cells = (
                        some[0],
                        columns + some[1],
                        2 * columns + some[2],
                        3 * columns + some[3],
                        4 * columns + some[4],
                    )
                    middle_of_five(table, cells, words, i, out, lo + a + i * SIGN_WORDS)
                else:
                    for j in range(5):
                        _ask(table[j * columns : (j + 1) * columns], some[j], words[j * SIGN_WORDS :], i, said[j, :n])
                    _middle(said[:, :n], out[lo + a + i * SIGN_WORDS : lo + a + i * SIGN_WORDS + n])
                for j in range(5):
                    some[j] += SIGN_WORDS
                    some[j] -= columns if some[j] >= columns else 0


@kernel
def _ask(row: Floats, place: int, words: Words, i: int, out: Floats) -> None:
    """A row's estimates for less than a word's run, or for a run that wraps around."""
    for g in range(out.size):
        cell = place + g
        value = row[cell - row.size if cell >= row.size else cell]
        out[g] = -value if np.uint32(np.uint32(words[g] >> np.uint32(31 - i)) & np.uint32(1)) else value


@kernel
def _estimate(table: Table, layers: int, first_word: int, key: Start, out: Floats) -> None:
    wide()
    rows, columns = table.shape
    words, near = np.empty(SIGN_WORDS, np.uint32), np.empty(SIGNS, np.float32)
    said = np.zeros((rows, min(SIGNS, columns)), np.float32)
    for layer in range(layers):
        lo = layer * columns
        size = min(columns, out.size - lo)
        for a in range(0, size, SIGNS):
            n = min(SIGNS, size - a)
            for j in range(rows):
                row = j * layers + layer
                _hash(words[:n], _first(first_word, row, columns, a, key), key[1])
                place = _turned(a, row, columns, key)
                if place + n <= columns:
                    _sign(table[j, place : place + n], words, said[j])
                else:
                    near[: columns - place] = table[j, place:]
                    near[columns - place : n] = table[j, : place + n - columns]
                    _sign(near[:n], words, said[j])
            _middle(said, out[lo + a : lo + a + n])


@kernel
def _first(first_word: int, row: int, columns: int, a: int, key: Start) -> np.uint32:
    """The counter of the first word of signs of a stretch."""
    return np.uint32(
        key[0] + np.uint32(first_word + (row * ((columns + SIGNS - 1) // SIGNS) + a // SIGNS) * SIGN_WORDS)
    )


@kernel
def _turned(a: int, row: int, columns: int, key: Start) -> np.int64:
    """The column at which a stretch begins."""
    shift = (np.int64(fraction(np.uint32(key[0] + np.uint32(row)), key[1])) * np.int64(columns)) >> np.int64(23)
    place = np.int64(a) + shift
    return place - np.int64(columns) if place >= columns else place


@kernel
def _hash(words: Words, counter: np.uint32, k1: np.uint32) -> None:
    wide()
    for g in range(words.size):
        words[g] = word(np.uint32(counter + np.uint32(g)), k1)


@kernel
def _sign(values: Floats, words: Words, out: Floats) -> None:
    wide()
    width = words.size
    for i in range((values.size + width - 1) // width):
        given, made = values[i * width : (i + 1) * width], out[i * width : (i + 1) * width]
        shift = np.uint32(31 - i)
        for g in range(given.size):
            made[g] = -given[g] if np.uint32(np.uint32(words[g] >> shift) & np.uint32(1)) else given[g]


@kernel
def _add_signed(values: Floats, words: Words, into: Floats) -> None:
    """Change signs and add in one pass, for a stretch that does not wrap around."""
    wide()
    whole = values.size // SIGN_WORDS
    for i in range(whole):
        add_signed(values, i * SIGN_WORDS, words, i, into, i * SIGN_WORDS)
    shift = np.uint32(31 - whole)
    for g in range(values.size - whole * SIGN_WORDS):
        value = values[whole * SIGN_WORDS + g]
        into[whole * SIGN_WORDS + g] += -value if np.uint32(np.uint32(words[g] >> shift) & np.uint32(1)) else value


@kernel
def _plus(values: Floats, into: Floats) -> None:
    wide()
    for i in range(values.size):
        into[i] += values[i]


@kernel
def _middle(said: Table, out: Floats) -> None:
    """The median of the rows' estimates, by a partial sort."""
    rows = said.shape[0]
    for done in range(rows // 2 + 1):
        for j in range(rows - 1, done, -1):
            _exchange(said[j - 1], said[j])
    for i in range(out.size):
        out[i] = said[rows // 2, i] + np.float32(0)


@kernel
def _exchange(low: Floats, high: Floats) -> None:
    wide()
    for i in range(low.size):
        a, b = low[i], high[i]
        low[i], high[i] = min(a, b), max(a, b)
