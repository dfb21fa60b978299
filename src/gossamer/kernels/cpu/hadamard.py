"""Butterflies of a Hadamard transform on eight columns at once, and turns of squares of eight rows.

In one piece each, as in `signs.py`: a loop of so few is looked at for overlaps for longer than it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gossamer.kernels.cpu.compile import Floats
from gossamer.kernels.cpu.signs import Words

LANES = 8
COLUMNS = 32  # elements of one row: as many as a word has signs
_FLOATS, _INTS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)
_WORD, _LONG = ir.IntType(32), ir.IntType(64)
Step = Callable[[Floats, int, int], None]
SignedStep = Callable[[Floats, int, int, Words, int, int], None]
Turn = Callable[[Floats, int, int, Floats, int, int], None]


def _pointer(context: Any, builder: Any, vector: Any, kind: Any, array: Any, index: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def _places(context: Any, builder: Any, kind: Any, array: Any, at: Any, stride: Any, count: int) -> list[Any]:
    """Pointers to eight columns of `count` rows."""
    places = list[Any]()
    for i in range(count):
        index = builder.add(at, builder.mul(stride, _LONG(i))) if i else at
        places.append(_pointer(context, builder, _FLOATS, kind, array, index))
    return places


def _load(builder: Any, place: Any) -> Any:
    loaded = builder.load(place)
    loaded.align = 4
    return loaded


def _splat(builder: Any, vector: Any, value: Any) -> Any:
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, _WORD(0))
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), ir.Constant(_INTS, [0] * LANES))


def _halves(builder: Any, rows: list[Any], step: int) -> list[Any]:
    """One level of butterflies: the sum and the difference of rows that are `step` apart."""
    out = list[Any](rows)
    for i in range(len(rows)):
        if not i & step:
            out[i], out[i | step] = builder.fadd(rows[i], rows[i | step]), builder.fsub(rows[i], rows[i | step])
    return out


def _levels(builder: Any, rows: list[Any], down: bool) -> list[Any]:
    steps = [1 << k for k in range(len(rows).bit_length() - 1)]
    for step in reversed(steps) if down else steps:
        rows = _halves(builder, rows, step)
    return rows


def _step(count: int, down: bool) -> Step:
    """Butterflies of `count` rows, `stride` apart, whose first begins at `at`."""

    def typed(context: Any, x: Any, at: Any, stride: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            array, at, stride = arguments
            places = _places(context, builder, signature.args[0], array, at, stride, count)
            rows = _levels(builder, [_load(builder, place) for place in places], down)
            for row, place in zip(rows, places, strict=True):
                builder.store(row, place).align = 4
            return context.get_dummy_value()

        return types.none(x, types.int64, types.int64), generate

    return cast(Step, intrinsic(typed))


up2, up4, up8 = (_step(count, False) for count in (2, 4, 8))
down2, down4, down8 = (_step(count, True) for count in (2, 4, 8))


def _signed(context: Any, x: Any, at: Any, stride: Any, words: Any, first: Any, bit: Any) -> Any:
    """Four rows, eight rows of the signs' words apart: butterflies, signs, butterflies back."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (array, at, stride, words, first, bit), kinds = arguments, signature.args
        places = _places(context, builder, kinds[0], array, at, stride, 4)
        rows = _levels(builder, [_load(builder, place) for place in places], False)
        signs = _load(builder, _pointer(context, builder, _INTS, kinds[3], words, first))
        for i in range(4):
            shift = builder.sub(_WORD(31 - 8 * i), builder.trunc(bit, _WORD))
            moved = builder.and_(builder.shl(signs, _splat(builder, _INTS, shift)), ir.Constant(_INTS, [-(2**31)] * 8))
            rows[i] = _flipped(builder, rows[i], moved)
        for row, place in zip(_levels(builder, rows, True), places, strict=True):
            builder.store(row, place).align = 4
        return context.get_dummy_value()

    return types.none(x, types.int64, types.int64, words, types.int64, types.int64), generate


signed4 = cast(SignedStep, intrinsic(_signed))


def _turned(context: Any, x: Any, at: Any, stride: Any, out: Any, to: Any, other: Any) -> Any:
    """Write a square of eight rows and columns to another array, columns as rows."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (array, at, stride, out, to, other), kinds = arguments, signature.args
        rows = [_load(builder, p) for p in _places(context, builder, kinds[0], array, at, stride, LANES)]

        def pair(a: Any, b: Any, low: bool, size: int) -> Any:
            """Runs of `size` lanes, alternately of a and b: the even runs of both, or the odd ones."""
            mask = [
                i - i % (2 * size) + i % size + (0 if low else size) + (LANES if i % (2 * size) >= size else 0)
                for i in range(LANES)
            ]
            return builder.shuffle_vector(a, b, ir.Constant(_INTS, mask))

        for size in (1, 2, 4):
            turned = list[Any](rows)
            for i in range(LANES):
                if not i & size:
                    turned[i] = pair(rows[i], rows[i | size], True, size)
                    turned[i | size] = pair(rows[i], rows[i | size], False, size)
            rows = turned
        for row, place in zip(rows, _places(context, builder, kinds[3], out, to, other, LANES), strict=True):
            builder.store(row, place).align = 4
        return context.get_dummy_value()

    return types.none(x, types.int64, types.int64, out, types.int64, types.int64), generate


turned8 = cast(Turn, intrinsic(_turned))


def _folder(squared: bool) -> Callable[..., None]:
    """Add eight rows, or their squares: four onto four, two onto two, one onto one."""

    def typed(context: Any, x: Any, at: Any, stride: Any, out: Any, to: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            (array, at, stride, out, to), kinds = arguments, signature.args
            rows = [_load(builder, p) for p in _places(context, builder, kinds[0], array, at, stride, 8)]
            rows = [builder.fmul(row, row) for row in rows] if squared else rows
            while len(rows) > 1:
                half = len(rows) // 2
                rows = [builder.fadd(a, b) for a, b in zip(rows[:half], rows[half:], strict=True)]
            builder.store(rows[0], _pointer(context, builder, _FLOATS, kinds[3], out, to)).align = 4
            return context.get_dummy_value()

        return types.none(x, types.int64, types.int64, out, types.int64), generate

    return cast(Callable[..., None], intrinsic(typed))


folded8, squared8 = _folder(False), _folder(True)


def _row_signs(builder: Any, word: Any, first: int) -> Any:
    """Sign bits of eight neighbours, whose first has bit `first` of the word."""
    shifts = ir.Constant(_INTS, [31 - first - i for i in range(LANES)])
    return builder.and_(builder.shl(_splat(builder, _INTS, word), shifts), ir.Constant(_INTS, [-(2**31)] * LANES))


def _flipped(builder: Any, row: Any, signs: Any) -> Any:
    return builder.bitcast(builder.xor(builder.bitcast(row, _INTS), signs), _FLOATS)


def _taken(context: Any, x: Any, at: Any, factor: Any, word: Any, out: Any, to: Any) -> Any:
    """Write a row of 32 times a factor, with the signs of a word."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (array, at, factor, word, out, to), kinds = arguments, signature.args
        factors = _splat(builder, _FLOATS, factor)
        given = _places(context, builder, kinds[0], array, at, _LONG(LANES), 4)
        written = _places(context, builder, kinds[4], out, to, _LONG(LANES), 4)
        for i in range(4):
            row = builder.fmul(_load(builder, given[i]), factors)
            builder.store(_flipped(builder, row, _row_signs(builder, word, 8 * i)), written[i]).align = 4
        return context.get_dummy_value()

    return types.none(x, types.int64, types.float32, types.uint32, out, types.int64), generate


taken32 = cast(Callable[..., None], intrinsic(_taken))


def _giver(anew: bool) -> Callable[..., None]:
    """Write a row of 32 with the signs of a word, times two factors, or add it; writing adds to 0.0."""

    def typed(context: Any, x: Any, at: Any, factors: Any, word: Any, out: Any, to: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            (array, at, factors, word, out, to), kinds = arguments, signature.args
            first, second = (_splat(builder, _FLOATS, builder.extract_value(factors, i)) for i in range(2))
            given = _places(context, builder, kinds[0], array, at, _LONG(LANES), 4)
            written = _places(context, builder, kinds[4], out, to, _LONG(LANES), 4)
            for i in range(4):
                row = _flipped(builder, _load(builder, given[i]), _row_signs(builder, word, 8 * i))
                said = builder.fmul(builder.fmul(row, first), second)
                old = ir.Constant(_FLOATS, [0.0] * LANES) if anew else _load(builder, written[i])
                builder.store(builder.fadd(old, said), written[i]).align = 4
            return context.get_dummy_value()

        two = types.UniTuple(types.float32, 2)
        return types.none(x, types.int64, two, types.uint32, out, types.int64), generate

    return cast(Callable[..., None], intrinsic(typed))


put32, added32 = _giver(True), _giver(False)
