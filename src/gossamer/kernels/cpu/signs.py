"""Changes the signs of 64 numbers at once, where the bits of a word are one."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gossamer.kernels.cpu.compile import Floats
from gossamer.kernels.cpu.vectors import LONG, WORD, Vectors

Words = npt.NDArray[np.uint32]
Signed = Callable[[Floats, int, Words, int, Floats, int], None]
Asked = Callable[[Floats, tuple[int, int, int, int, int], Words, int, Floats, int], None]
_LANES = 64


def _add_signed(context: Any, given: Any, at: Any, words: Any, i: Any, out: Any, to: Any) -> Any:
    """out[to:][:64] += given[at:][:64], signed by bit 31 - i of 64 words."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        v, kinds, (given, at, words, i, out, to) = Vectors(context, builder, _LANES), signature.args, arguments
        drawn = v.load(v.place((kinds[2], words), LONG(0), v.ints))
        shift = v.broadcast(builder.trunc(i, WORD), v.ints)
        more = v.flip(v.load(v.place((kinds[0], given), at)), drawn, shift)
        place = v.place((kinds[4], out), to)
        return v.store([builder.fadd(v.load(place), more)], [place])

    return types.none(given, types.int64, words, types.int64, out, types.int64), generate


def _middle(context: Any, table: Any, cells: Any, words: Any, i: Any, out: Any, to: Any) -> Any:
    """out[to:][:64] = the median of five stretches of a table, each signed by words of its own."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        v, kinds, (table, cells, words, i, out, to) = Vectors(context, builder, _LANES), signature.args, arguments
        shift, said = v.broadcast(builder.trunc(i, WORD), v.ints), list[Any]()
        for j in range(5):
            drawn = v.load(v.place((kinds[2], words), LONG(_LANES * j), v.ints))
            values = v.load(v.place((kinds[0], table), builder.extract_value(cells, j)))
            said.append(v.flip(values, drawn, shift))
        middle = builder.fadd(_of_five(builder, *said), ir.Constant(v.floats, [0.0] * _LANES))
        return v.store([middle], [v.place((kinds[4], out), to)])

    return types.none(table, types.UniTuple(types.int64, 5), words, types.int64, out, types.int64), generate


def _of_five(builder: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
    """The median of five: drops the smallest and the largest of two pairs, and takes the median of the other three."""

    def less(x: Any, y: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", x, y), x, y)

    def larger(x: Any, y: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", x, y), x, y)

    low, high = larger(less(a, b), less(d, e)), less(larger(a, b), larger(d, e))
    return larger(less(low, high), less(larger(low, high), c))


add_signed = cast(Signed, intrinsic(_add_signed))
middle_of_five = cast(Asked, intrinsic(_middle))
