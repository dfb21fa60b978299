"""The nearest of a few levels for sixteen numbers at once, and the levels of sixteen codes.

Limits are compared one after another, and levels chosen by the bits of a code: a look-up in a
table would take one element at a time.
"""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gossamer.kernels.cpu.compile import Bytes, Floats, kernel
from gossamer.kernels.cpu.hadamard import Scratch
from gossamer.kernels.cpu.vectors import FLOAT, LONG, Vectors

_LANES = 16
_BYTES = ir.VectorType(ir.IntType(8), _LANES)


def _entries(v: Vectors, table: tuple[Any, Any], count: int) -> list[Any]:
    """The first numbers of a table, each in all lanes."""
    return [v.broadcast(v.builder.load(v.place(table, LONG(i), FLOAT)), v.floats) for i in range(count)]


def _rounder(bits: int) -> Callable[[Scratch, int, Floats, Bytes, int], None]:
    """codes[to:] = the number of the block's limits below |z|, and its sign above, for z = the block's elements from `at` on.

    |z| times the level is written where the transpose was.
    """

    def typed(context: Any, scratch: Any, at: Any, levels: Any, codes: Any, to: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            v, kinds, (scratch, at, levels, codes, to) = Vectors(context, builder, _LANES), signature.args, arguments
            block, products, limits = (v.member(scratch, kinds[0], i) for i in (0, 1, 4))
            z, code = v.load(v.place(block, at)), v.constant(0)
            size = builder.bitcast(builder.and_(builder.bitcast(z, v.ints), v.constant(2**31 - 1)), v.floats)
            level, *others = _entries(v, (kinds[2], levels), 1 << (bits - 1))
            for limit, other in zip(_entries(v, limits, len(others)), others, strict=True):
                above = builder.fcmp_ordered(">", size, limit)
                code = builder.sub(code, builder.sext(above, v.ints))
                level = builder.select(above, other, level)
            negative = builder.fcmp_ordered("<", z, ir.Constant(v.floats, [0.0] * _LANES))
            code = builder.or_(code, builder.and_(builder.sext(negative, v.ints), v.constant(1 << (bits - 1))))
            builder.store(builder.trunc(code, _BYTES), v.place((kinds[3], codes), to, _BYTES)).align = 1
            return v.store([builder.fmul(size, level)], [v.place(products, at)])

        return types.none(scratch, types.int64, levels, codes, types.int64), generate

    return cast(Any, intrinsic(typed))


def _meaning(bits: int) -> Callable[[Scratch, int, Floats, Bytes, int], None]:
    """The block's elements from `to` on = the levels of codes[at:], with their signs."""

    def typed(context: Any, scratch: Any, to: Any, levels: Any, codes: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            v, kinds, (scratch, to, levels, codes, at) = Vectors(context, builder, _LANES), signature.args, arguments
            code = builder.zext(v.load(v.place((kinds[3], codes), at, _BYTES), 1), v.ints)
            chosen = _entries(v, (kinds[2], levels), 1 << (bits - 1))
            for bit in range(bits - 1):
                odd = builder.icmp_unsigned("!=", builder.and_(code, v.constant(1 << bit)), v.constant(0))
                chosen = [builder.select(odd, b, a) for a, b in zip(chosen[::2], chosen[1::2], strict=True)]
            return v.store(
                [v.flip(chosen[0], code, v.constant(32 - bits))], [v.place(v.member(scratch, kinds[0], 0), to)]
            )

        return types.none(scratch, types.int64, levels, codes, types.int64), generate

    return cast(Any, intrinsic(typed))


_round1, _round2, _round3, _round4, _round5, _round6 = (_rounder(bits) for bits in range(1, 7))
_mean1, _mean2, _mean3, _mean4, _mean5, _mean6 = (_meaning(bits) for bits in range(1, 7))


@kernel
def round_block(scratch: Scratch, size: int, bits: int, levels: Floats, codes: Bytes, to: int) -> None:
    """The codes of the rotated block, and the products of its elements with their levels in the transpose's place."""
    for j in range(0, size, 16):
        if bits == 1:
            _round1(scratch, j, levels, codes, to + j)
        elif bits == 2:
            _round2(scratch, j, levels, codes, to + j)
        elif bits == 3:
            _round3(scratch, j, levels, codes, to + j)
        elif bits == 4:
            _round4(scratch, j, levels, codes, to + j)
        elif bits == 5:
            _round5(scratch, j, levels, codes, to + j)
        else:
            _round6(scratch, j, levels, codes, to + j)


@kernel
def read_block(scratch: Scratch, size: int, bits: int, levels: Floats, codes: Bytes, at: int) -> None:
    """The levels of a block's codes."""
    for j in range(0, size, 16):
        if bits == 1:
            _mean1(scratch, j, levels, codes, at + j)
        elif bits == 2:
            _mean2(scratch, j, levels, codes, at + j)
        elif bits == 3:
            _mean3(scratch, j, levels, codes, at + j)
        elif bits == 4:
            _mean4(scratch, j, levels, codes, at + j)
        elif bits == 5:
            _mean5(scratch, j, levels, codes, at + j)
        else:
            _mean6(scratch, j, levels, codes, at + j)
