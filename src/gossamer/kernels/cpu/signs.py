"""Changes the signs of 64 numbers at once, where the bits of a word are one.

In one piece, because a loop of so few is looked at for overlaps, and for a rest, for longer than it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gossamer.kernels.cpu.compile import Floats

Words = npt.NDArray[np.uint32]
Signed = Callable[[Floats, int, Words, int, Floats, int], None]
Asked = Callable[[Floats, tuple[int, int, int, int, int], Words, int, Floats, int], None]
_BITS, _FLOATS = ir.VectorType(ir.IntType(32), 64), ir.VectorType(ir.FloatType(), 64)


def _place(context: Any, builder: Any, vector: Any, kind: Any, array: Any, index: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def _load(builder: Any, place: Any) -> Any:
    loaded = builder.load(place)
    loaded.align = 4
    return loaded


def _signed(context: Any, builder: Any, given: Any, rng: Any, i: Any) -> Any:
    """64 numbers with changed signs, as bits; numbers and words are each (kind, array, position)."""
    first = builder.insert_element(
        ir.Constant(_BITS, ir.Undefined), builder.trunc(i, ir.IntType(32)), ir.Constant(ir.IntType(32), 0)
    )
    shift = builder.shuffle_vector(first, ir.Constant(_BITS, ir.Undefined), ir.Constant(_BITS, [0] * 64))
    words = _load(builder, _place(context, builder, _BITS, *rng))
    sign = builder.and_(builder.shl(words, shift), ir.Constant(_BITS, [-(2**31)] * 64))
    return builder.xor(_load(builder, _place(context, builder, _BITS, *given)), sign)


def _add_signed(context: Any, given: Any, at: Any, words: Any, i: Any, out: Any, to: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds, (given, at, words, i, out, to) = signature.args, arguments
        place = _place(context, builder, _FLOATS, kinds[4], out, to)
        rng = kinds[2], words, ir.Constant(ir.IntType(64), 0)
        more = builder.bitcast(_signed(context, builder, (kinds[0], given, at), rng, i), _FLOATS)
        builder.store(builder.fadd(_load(builder, place), more), place).align = 4
        return context.get_dummy_value()

    return types.none(given, types.int64, words, types.int64, out, types.int64), generate


def _middle(context: Any, table: Any, cells: Any, words: Any, i: Any, out: Any, to: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds, (table, cells, words, i, out, to) = signature.args, arguments
        said = list[Any]()
        for j in range(5):
            cell = builder.extract_value(cells, j)
            rng = kinds[2], words, ir.Constant(ir.IntType(64), 64 * j)
            said.append(builder.bitcast(_signed(context, builder, (kinds[0], table, cell), rng, i), _FLOATS))
        middle = builder.fadd(_of_five(builder, *said), ir.Constant(_FLOATS, [0.0] * 64))
        builder.store(middle, _place(context, builder, _FLOATS, kinds[4], out, to)).align = 4
        return context.get_dummy_value()

    return types.none(table, types.UniTuple(types.int64, 5), words, types.int64, out, types.int64), generate


def _of_five(builder: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
    """The median of five: drops the smallest and the largest of two pairs, and takes the median of the other three."""

    def less(x: Any, y: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", x, y), x, y)

    def larger(x: Any, y: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", x, y), x, y)

    low, high = larger(less(a, b), less(d, e)), less(larger(a, b), larger(d, e))
    return larger(less(low, high), less(larger(low, high), c))


add_signed = cast(Signed, intrinsic(_add_signed))  # out[to:][:64] += given[at:][:64], signed by bit 31 - i of 64 words
middle_of_five = cast(
    Asked, intrinsic(_middle)
)  # out[to:][:64] = of five stretches of a table, each signed by words of its own
