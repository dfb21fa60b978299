"""Count sketches: a program sums some cells of one row over the layers, or estimates some elements from all rows."""

# Triton's language is not typed Python.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.gpu import OPTIONS
from gossamer.kernels.gpu.hashing import fraction, word, words
from gossamer.kernels.layout import Turns

_CELLS = 256  # of one program that adds: few, as tables are short
_ASKED = 256  # elements of one program that estimates


def add(x: Tensor, turns: Turns, table: Tensor) -> None:
    tiles = triton.cdiv(turns.columns, _CELLS)
    rng = (turns.first_word, turns.words, *words(turns.key))
    _add[(turns.rows * tiles,)](x, table, turns.n, turns.columns, turns.layers, tiles, *rng, _CELLS, **OPTIONS)


def estimate(table: Tensor, turns: Turns, out: Tensor) -> None:
    tiles = triton.cdiv(turns.columns, _ASKED)
    rng = (turns.first_word, turns.words, *words(turns.key))
    room = triton.next_power_of_2(turns.rows)
    grid = (turns.layers * tiles,)
    _estimate[grid](table, out, turns.n, turns.columns, turns.layers, tiles, *rng, turns.rows, room, _ASKED, **OPTIONS)


@triton.jit(do_not_specialize=["columns", "layers", "tiles", "first_word", "per_layer", "counter", "k1"])
def _add(x, table, n, columns, layers, tiles, first_word, per_layer, counter, k1, CELLS: tl.constexpr):
    row = tl.program_id(0) // tiles
    cell = tl.program_id(0) % tiles * CELLS + tl.arange(0, CELLS)
    total = tl.zeros([CELLS], tl.float32)
    for layer in range(layers):
        first = columns.to(tl.int64) * layer
        size = tl.minimum(n - first, columns).to(tl.int32)
        turn = row * layers + layer
        place = cell - shift_of(turn, columns, counter, k1)
        place = tl.where(place < 0, place + columns, place)
        inside = (cell < columns) & (place < size)
        value = tl.load(x + first + place, mask=inside, other=0.0)
        total += tl.where(negative(turn, place, first_word, per_layer, counter, k1), -value, value)
    tl.store(table + row.to(tl.int64) * columns + cell, total, mask=cell < columns)


@triton.jit(do_not_specialize=["columns", "layers", "tiles", "first_word", "per_layer", "counter", "k1"])
def _estimate(
    table, out, n, columns, layers, tiles, first_word, per_layer, counter, k1,
    ROWS: tl.constexpr, ROOM: tl.constexpr, ASKED: tl.constexpr
):  # fmt: skip
    layer = tl.program_id(0) // tiles
    first = layer.to(tl.int64) * columns
    size = tl.minimum(n - first, columns).to(tl.int32)
    place = tl.program_id(0) % tiles * ASKED + tl.arange(0, ASKED)[:, None]
    row = tl.arange(0, ROOM)[None, :]
    turn = row * layers + layer
    cell = place + shift_of(turn, columns, counter, k1)
    cell = tl.where(cell >= columns, cell - columns, cell)
    inside = (place < size) & (row < ROWS)
    value = tl.load(table + row.to(tl.int64) * columns + cell, mask=inside, other=0.0)
    value = tl.where(negative(turn, place, first_word, per_layer, counter, k1), -value, value)
    value = tl.where(row < ROWS, value, float("inf"))  # rows that there are not come last
    if ROOM > 1:
        value = tl.sort(value, 1)
    middle = tl.sum(tl.where(row == ROWS // 2, value, 0.0), 1) + 0.0
    asked = tl.program_id(0) % tiles * ASKED + tl.arange(0, ASKED)
    tl.store(out + first + asked, middle, mask=asked < size)


@triton.jit
def shift_of(turn, columns, counter, k1):
    """Number of columns by which a row rotates a layer."""
    rng = fraction(turn.to(tl.uint32) + counter.to(tl.uint32), k1)
    return ((rng.to(tl.int64) * columns) >> 23).to(tl.int32)


@triton.jit
def negative(turn, place, first_word, per_layer, counter, k1):
    """True if an element of a layer changes its sign in a row."""
    at = turn.to(tl.uint32) * per_layer.to(tl.uint32) + ((place >> 11) * 64 + (place & 63)).to(tl.uint32)
    rng = word(at + first_word.to(tl.uint32) + counter.to(tl.uint32), k1)
    return ((rng >> (31 - ((place >> 6) & 31)).to(tl.uint32)) & 1) == 1
