"""The nearest of a few levels for sixteen numbers at once, and the levels of sixteen codes.

In one piece, as in `signs.py`. Limits are compared one after another, and levels chosen by the bits of a code: without a
look-up in a table, which takes one element at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gossamer.kernels.cpu.compile import Bytes, Floats

LANES = 16
_FLOATS, _INTS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_WORD, _LONG = ir.IntType(32), ir.IntType(64)
Round = Callable[[Floats, int, Floats, Floats, Bytes, int, Floats], None]
Mean = Callable[[Bytes, int, Floats, Floats, int], None]


def _pointer(context: Any, builder: Any, vector: Any, kind: Any, array: Any, index: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def _load(builder: Any, place: Any, align: int = 4) -> Any:
    loaded = builder.load(place)
    loaded.align = align
    return loaded


def _entry(context: Any, builder: Any, kind: Any, table: Any, i: int) -> Any:
    """One number of a table in all lanes."""
    data = context.make_array(kind)(context, builder, table).data
    first = builder.insert_element(
        ir.Constant(_FLOATS, ir.Undefined), builder.load(builder.gep(data, [_LONG(i)])), _WORD(0)
    )
    return builder.shuffle_vector(first, ir.Constant(_FLOATS, ir.Undefined), ir.Constant(_INTS, [0] * LANES))


def _rounder(bits: int) -> Round:
    """codes[to:] = the number of limits below |z[at:]|, and its sign; products[at:] = |z| times the level."""

    def typed(context: Any, z: Any, at: Any, limits: Any, levels: Any, codes: Any, to: Any, products: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            (array, at, limits, levels, codes, to, products), kinds = arguments, signature.args
            numbers = _load(builder, _pointer(context, builder, _FLOATS, kinds[0], array, at))
            positive = ir.Constant(_INTS, [2**31 - 1] * LANES)
            size = builder.bitcast(builder.and_(builder.bitcast(numbers, _INTS), positive), _FLOATS)
            code, level = ir.Constant(_INTS, [0] * LANES), _entry(context, builder, kinds[3], levels, 0)
            for i in range((1 << (bits - 1)) - 1):
                above = builder.fcmp_ordered(">", size, _entry(context, builder, kinds[2], limits, i))
                code = builder.sub(code, builder.sext(above, _INTS))
                level = builder.select(above, _entry(context, builder, kinds[3], levels, i + 1), level)
            negative = builder.fcmp_ordered("<", numbers, ir.Constant(_FLOATS, [0.0] * LANES))
            sign = builder.and_(builder.sext(negative, _INTS), ir.Constant(_INTS, [1 << (bits - 1)] * LANES))
            code = builder.trunc(builder.or_(code, sign), _BYTES)
            builder.store(code, _pointer(context, builder, _BYTES, kinds[4], codes, to)).align = 1
            place = _pointer(context, builder, _FLOATS, kinds[6], products, at)
            builder.store(builder.fmul(size, level), place).align = 4
            return context.get_dummy_value()

        return types.none(z, types.int64, limits, levels, codes, types.int64, products), generate

    return cast(Round, intrinsic(typed))


def _meaning(bits: int) -> Mean:
    """out[to:] = the levels of codes[at:], with their signs."""

    def typed(context: Any, codes: Any, at: Any, levels: Any, out: Any, to: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            (codes, at, levels, out, to), kinds = arguments, signature.args
            code = builder.zext(_load(builder, _pointer(context, builder, _BYTES, kinds[0], codes, at), 1), _INTS)
            chosen = [_entry(context, builder, kinds[2], levels, i) for i in range(1 << (bits - 1))]
            for bit in range(bits - 1):
                mask = ir.Constant(_INTS, [1 << bit] * LANES)
                odd = builder.icmp_unsigned("!=", builder.and_(code, mask), ir.Constant(_INTS, [0] * LANES))
                chosen = [builder.select(odd, b, a) for a, b in zip(chosen[::2], chosen[1::2], strict=True)]
            top = ir.Constant(_INTS, [-(2**31)] * LANES)
            sign = builder.and_(builder.shl(code, ir.Constant(_INTS, [32 - bits] * LANES)), top)
            level = builder.bitcast(builder.xor(builder.bitcast(chosen[0], _INTS), sign), _FLOATS)
            builder.store(level, _pointer(context, builder, _FLOATS, kinds[3], out, to)).align = 4
            return context.get_dummy_value()

        return types.none(codes, types.int64, levels, out, types.int64), generate

    return cast(Mean, intrinsic(typed))


round1, round2, round3, round4, round5, round6 = (_rounder(bits) for bits in range(1, 7))
mean1, mean2, mean3, mean4, mean5, mean6 = (_meaning(bits) for bits in range(1, 7))
