"""Pieces of a rotation: butterflies of rows on eight columns at once, signs, squares of eight rows transposed, and sums.

In one piece each, as in `signs.py`: a loop of so few is looked at for overlaps for longer than it takes. A block is a matrix
with rows of 32 in the first scratch array; its transpose is in the second, and the words of the signs are in the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gossamer.kernels.cpu.compile import Floats
from gossamer.kernels.cpu.signs import Words

Scratch = tuple[Floats, Floats, Words, Words, Floats]  # and place for a few limits
WORD, LONG, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_TOP = -(2**31)


class Vectors:
    """Writes the instructions of an intrinsic for so many numbers at once."""

    def __init__(self, context: Any, builder: Any, lanes: int) -> None:
        self.context, self.builder, self.lanes = context, builder, lanes
        self.ints, self.floats = ir.VectorType(WORD, lanes), ir.VectorType(FLOAT, lanes)

    def member(self, scratch: Any, kind: Any, i: int) -> tuple[Any, Any]:
        """An array of a tuple of arrays, as its type and its value."""
        return kind.types[i], self.builder.extract_value(scratch, i)

    def place(self, array: tuple[Any, Any], index: Any, vector: Any = None) -> Any:
        """The pointer to the vector that begins at an element."""
        data = self.context.make_array(array[0])(self.context, self.builder, array[1]).data
        place = self.builder.gep(data, [index])
        return self.builder.bitcast(place, (vector or self.floats).as_pointer())

    def rows(self, array: tuple[Any, Any], at: Any, stride: Any, count: int) -> list[Any]:
        """The pointers to as many columns of `count` rows."""
        steps = [self.builder.mul(stride, LONG(i)) for i in range(count)]
        return [self.place(array, self.builder.add(at, step)) for step in steps]

    def load(self, place: Any, align: int = 4) -> Any:
        loaded = self.builder.load(place)
        loaded.align = align
        return loaded

    def store(self, values: list[Any], places: list[Any]) -> Any:
        for value, place in zip(values, places, strict=True):
            self.builder.store(value, place).align = 4
        return self.context.get_dummy_value()

    def broadcast(self, value: Any, vector: Any) -> Any:
        """One number in all lanes."""
        none = ir.Constant(vector, ir.Undefined)
        first = self.builder.insert_element(none, value, WORD(0))
        return self.builder.shuffle_vector(first, none, self.constant(0))

    def constant(self, value: int) -> Any:
        return ir.Constant(self.ints, [value] * self.lanes)

    def flip(self, values: Any, words: Any, shifts: Any) -> Any:
        """Change signs where a word, shifted up, has its highest bit set."""
        signs = self.builder.and_(self.builder.shl(words, shifts), self.constant(_TOP))
        bits = self.builder.xor(self.builder.bitcast(values, self.ints), signs)
        return self.builder.bitcast(bits, self.floats)

    def butterflies(self, rows: list[Any], down: bool) -> list[Any]:
        """Sums and differences of rows: of neighbours first, or of neighbours last."""
        steps = [1 << k for k in range(len(rows).bit_length() - 1)]
        for step in reversed(steps) if down else steps:
            for i in [i for i in range(len(rows)) if not i & step]:
                a, b = rows[i], rows[i | step]
                rows[i], rows[i | step] = self.builder.fadd(a, b), self.builder.fsub(a, b)
        return rows

    def halves(self, rows: list[Any]) -> Any:
        """The sum of rows: halves onto halves."""
        while len(rows) > 1:
            half = len(rows) // 2
            rows = [self.builder.fadd(a, b) for a, b in zip(rows[:half], rows[half:], strict=True)]
        return rows[0]


def _step(count: int, down: bool) -> Callable[[Floats, int, int], None]:
    """Butterflies of `count` rows, `stride` apart, whose first begins at `at`."""

    def typed(context: Any, x: Any, at: Any, stride: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            v, (array, at, stride) = Vectors(context, builder, 8), arguments
            places = v.rows((signature.args[0], array), at, stride, count)
            return v.store(v.butterflies([v.load(place) for place in places], down), places)

        return types.none(x, types.int64, types.int64), generate

    return cast(Callable[[Floats, int, int], None], intrinsic(typed))


up2, up4, up8 = (_step(count, False) for count in (2, 4, 8))
down2, down4, down8 = (_step(count, True) for count in (2, 4, 8))


def _signed(context: Any, scratch: Any, rows: Any, row: Any, column: Any) -> Any:
    """Of the transpose rows `row`, row + 8, + 16 and + 24: butterflies, the second signs, and butterflies back."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        v, (scratch, rows, row, column) = Vectors(context, builder, 8), arguments
        transposed, words = (v.member(scratch, signature.args[0], i) for i in (1, 3))
        at = builder.add(builder.mul(rows, row), column)
        places = v.rows(transposed, at, builder.mul(rows, LONG(8)), 4)
        found = v.butterflies([v.load(place) for place in places], False)
        drawn = v.load(v.place(words, column, v.ints))
        for i in range(4):
            shift = builder.sub(WORD(31 - 8 * i), builder.trunc(row, WORD))
            found[i] = v.flip(found[i], drawn, v.broadcast(shift, v.ints))
        return v.store(v.butterflies(found, True), places)

    return types.none(scratch, types.int64, types.int64, types.int64), generate


def _transposed(context: Any, x: Any, at: Any, out: Any, to: Any, strides: Any) -> Any:
    """Write a square of eight rows and columns to another array, columns as rows; strides are those of both."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        v, (array, at, out, to, strides) = Vectors(context, builder, 8), arguments
        first, second = (builder.extract_value(strides, i) for i in range(2))
        rows = [v.load(place) for place in v.rows((signature.args[0], array), at, first, 8)]
        for size in (1, 2, 4):  # swap the runs of `size` lanes beside the diagonal, of rows that are `size` apart
            for i in [i for i in range(8) if not i & size]:
                a, b = rows[i], rows[i | size]
                for j, odd in ((i, 0), (i | size, size)):
                    mask = [k + odd if not k & size else 8 + k - size + odd for k in range(8)]
                    rows[j] = builder.shuffle_vector(a, b, ir.Constant(v.ints, mask))
        return v.store(rows, v.rows((signature.args[2], out), to, second, 8))

    return types.none(x, types.int64, out, types.int64, types.UniTuple(types.int64, 2)), generate


def _folder(squared: bool) -> Callable[[Floats, int, Floats], None]:
    """out[at:][:8] = the sum of eight vectors of x, `stride` apart, or of their squares: halves onto halves."""

    def typed(context: Any, x: Any, at: Any, stride: Any, out: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            v, (array, at, stride, out) = Vectors(context, builder, 8), arguments
            rows = [v.load(place) for place in v.rows((signature.args[0], array), at, stride, 8)]
            rows = [builder.fmul(row, row) for row in rows] if squared else rows
            return v.store([v.halves(rows)], [v.place((signature.args[3], out), at)])

        return types.none(x, types.int64, types.int64, out), generate

    return cast(Any, intrinsic(typed))


def _loaded(context: Any, x: Any, at: Any, factor: Any, scratch: Any, row: Any) -> Any:
    """A row of the block = 32 elements times a factor, with the first signs."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        v, (array, at, factor, scratch, row) = Vectors(context, builder, 8), arguments
        block, words = (v.member(scratch, signature.args[3], i) for i in (0, 2))
        drawn, factors = v.broadcast(builder.load(v.place(words, row, WORD)), v.ints), v.broadcast(factor, v.floats)
        given = v.rows((signature.args[0], array), at, LONG(8), 4)
        rows = [builder.fmul(v.load(place), factors) for place in given]
        rows = [v.flip(each, drawn, ir.Constant(v.ints, _shifts(i))) for i, each in enumerate(rows)]
        return v.store(rows, v.rows(block, builder.mul(row, LONG(32)), LONG(8), 4))

    return types.none(x, types.int64, types.float32, scratch, types.int64), generate


def _writer(anew: bool) -> Callable[[Scratch, int, tuple[np.float32, np.float32], Floats, int], None]:
    """out[at:][:32] = a row of the block with the first signs, times two factors; writing adds to 0.0."""

    def typed(context: Any, scratch: Any, row: Any, factors: Any, out: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            v, (scratch, row, factors, out, at) = Vectors(context, builder, 8), arguments
            block, words = (v.member(scratch, signature.args[0], i) for i in (0, 2))
            drawn = v.broadcast(builder.load(v.place(words, row, WORD)), v.ints)
            both = [v.broadcast(builder.extract_value(factors, i), v.floats) for i in range(2)]
            places = v.rows((signature.args[3], out), at, LONG(8), 4)
            rows = [v.load(place) for place in v.rows(block, builder.mul(row, LONG(32)), LONG(8), 4)]
            for i, place in enumerate(places):
                signed = v.flip(rows[i], drawn, ir.Constant(v.ints, _shifts(i)))
                said = builder.fmul(builder.fmul(signed, both[0]), both[1])
                rows[i] = builder.fadd(ir.Constant(v.floats, [0.0] * 8) if anew else v.load(place), said)
            return v.store(rows, places)

        two = types.UniTuple(types.float32, 2)
        return types.none(scratch, types.int64, two, out, types.int64), generate

    return cast(Any, intrinsic(typed))


def _shifts(i: int) -> list[int]:
    """How far up the bits of the i-th eight of a word's 32 elements are from the highest."""
    return [31 - 8 * i - lane for lane in range(8)]


signed4 = cast(Callable[[Scratch, int, int, int], None], intrinsic(_signed))
transpose8 = cast(Callable[[Floats, int, Floats, int, tuple[int, int]], None], intrinsic(_transposed))
load_row = cast(Callable[[Floats, int, np.float32, Scratch, int], None], intrinsic(_loaded))
sum8, sum_squares8 = (cast(Callable[[Floats, int, int, Floats], None], _folder(s)) for s in (False, True))
store_row, add_row = _writer(True), _writer(False)
