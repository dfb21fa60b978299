"""Pieces of a rotation: butterflies of rows on eight columns at once, signs, squares of eight rows transposed, and sums.

A block is a matrix with rows of 32 in the first scratch array; its transpose is in the second, and the words of the signs are
in the others.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gossamer.kernels.cpu.compile import Floats
from gossamer.kernels.cpu.signs import Words
from gossamer.kernels.cpu.vectors import LONG, WORD, Vectors

Scratch = tuple[Floats, Floats, Words, Words, Floats]  # and place for a few limits


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
