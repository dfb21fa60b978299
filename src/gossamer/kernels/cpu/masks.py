"""Masks of 64 bits, one bit per byte: compares 64 bytes at once, and moves selected bits together."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any, cast

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gossamer.kernels.cpu.compile import Bytes, kernel

_WORD, _BYTES = ir.IntType(64), ir.VectorType(ir.IntType(8), 64)
_FLAGS = ir.VectorType(ir.IntType(1), 64)


def _all(builder: Any, byte: Any) -> Any:
    """A vector that repeats one byte 64 times."""
    first = builder.insert_element(ir.Constant(_BYTES, ir.Undefined), byte, ir.Constant(ir.IntType(32), 0))
    where = ir.Constant(ir.VectorType(ir.IntType(32), 64), [0] * 64)
    return builder.shuffle_vector(first, ir.Constant(_BYTES, ir.Undefined), where)


def _place(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), _BYTES.as_pointer())


def _load(builder: Any, place: Any) -> Any:
    loaded = builder.load(place)
    loaded.align = 1
    return loaded


def _at_least(context: Any, x: Any, index: Any, bound: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = _load(builder, _place(context, builder, signature.args[0], arguments[0], arguments[1]))
        return builder.bitcast(builder.icmp_unsigned(">=", values, _all(builder, arguments[2])), _WORD)

    return types.uint64(x, types.int64, types.uint8), generate


def _has(context: Any, x: Any, index: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = _load(builder, _place(context, builder, signature.args[0], arguments[0], arguments[1]))
        found = builder.and_(values, _all(builder, arguments[2]))
        return builder.bitcast(builder.icmp_unsigned("!=", found, ir.Constant(_BYTES, None)), _WORD)

    return types.uint64(x, types.int64, types.uint8), generate


def _add_where(context: Any, x: Any, index: Any, flags: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _place(context, builder, signature.args[0], arguments[0], arguments[1])
        more = builder.select(
            builder.bitcast(arguments[2], _FLAGS), _all(builder, arguments[3]), ir.Constant(_BYTES, None)
        )
        builder.store(builder.add(_load(builder, place), more), place).align = 1
        return context.get_dummy_value()

    return types.none(x, types.int64, types.uint64, types.uint8), generate


at_least = cast(Callable[[Bytes, int, np.uint8], np.uint64], intrinsic(_at_least))  # which of x[i : i + 64] are
has = cast(
    Callable[[Bytes, int, np.uint8], np.uint64], intrinsic(_has)
)  # which of x[i : i + 64] have some of these bits
add_where = cast(Callable[[Bytes, int, np.uint64, np.uint8], None], intrinsic(_add_where))  # to some of x[i : i + 64]


def _squeezed(builder: Any, values: Any, flags: Any) -> Any:
    """Move the flagged ones of 64 bytes to the front, followed by zeros: an instruction of AVX-512."""
    kind, name = ir.FunctionType(_BYTES, [_BYTES, _BYTES, _FLAGS]), "llvm.x86.avx512.mask.compress.v64i8"
    known = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(known, [values, ir.Constant(_BYTES, None), builder.bitcast(flags, _FLAGS)])


def _squeeze_bytes(context: Any, x: Any, index: Any, flags: Any, out: Any, at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds, (given, index, flags, out, at) = signature.args, arguments
        values = _load(builder, _place(context, builder, kinds[0], given, index))
        moved = _squeezed(builder, values, flags)
        builder.store(moved, _place(context, builder, kinds[3], out, at)).align = 1
        return context.get_dummy_value()

    return types.none(x, types.int64, types.uint64, out, types.int64), generate


def _squeeze_depths(context: Any, x: Any, index: Any, r: Any, last: Any, flags: Any, out: Any, at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds, (given, index, r, last, flags, out, at) = signature.args, arguments
        values = _load(builder, _place(context, builder, kinds[0], given, index))
        quotients = builder.lshr(values, _all(builder, r))
        more = builder.zext(builder.icmp_unsigned("<", quotients, _all(builder, last)), _BYTES)
        moved = _squeezed(builder, builder.add(builder.add(quotients, quotients), more), flags)
        builder.store(moved, _place(context, builder, kinds[5], out, at)).align = 1
        return context.get_dummy_value()

    return types.none(x, types.int64, types.uint8, types.uint8, types.uint64, out, types.int64), generate


# out[at:][:64] = those of x[i : i + 64] that are flagged, side by side
squeeze_bytes = cast(Callable[[Bytes, int, np.uint64, Bytes, int], None], intrinsic(_squeeze_bytes))
# as much of twice their quotients by 1 << r, and one where that is less than the last
squeeze_depths = cast(
    Callable[[Bytes, int, np.uint8, np.uint8, np.uint64, Bytes, int], None], intrinsic(_squeeze_depths)
)


def _ones(context: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


ones = cast(Callable[[np.uint64], int], intrinsic(_ones))


def _instruction(name: str) -> Callable[[np.uint64, np.uint64], np.uint64]:
    """An x86 instruction, by its name in LLVM."""

    def describe(context: Any, word: Any, mask: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = ir.FunctionType(_WORD, [_WORD, _WORD])
            known = builder.module.globals.get(name)
            return builder.call(known or ir.Function(builder.module, kind, name), arguments)

        return types.uint64(types.uint64, types.uint64), generate

    return cast(Callable[[np.uint64, np.uint64], np.uint64], intrinsic(describe))


@kernel
def squeeze_by_shifts(word: np.uint64, mask: np.uint64) -> np.uint64:
    """Move the bits of a word that a mask selects to the lowest positions (Hacker's Delight 7-4)."""
    word &= mask
    skipped = np.uint64(~mask << np.uint64(1))
    for step in range(6):
        odd = skipped
        for distance in (1, 2, 4, 8, 16, 32):
            odd ^= odd << np.uint64(distance)
        moved = odd & mask
        shift = np.uint64(1 << step)
        mask = (mask ^ moved) | (moved >> shift)
        going = word & moved
        word = (word ^ going) | (going >> shift)
        skipped &= ~odd
    return word


@kernel
def spread_by_shifts(word: np.uint64, mask: np.uint64) -> np.uint64:
    """Move the lowest bits of a word to the positions that a mask selects; the inverse of `squeeze_by_shifts`."""
    out = np.uint64(0)
    while mask:
        lowest = mask & (~mask + np.uint64(1))
        if word & np.uint64(1):
            out |= lowest
        word >>= np.uint64(1)
        mask ^= lowest
    return out


def _has_instructions() -> bool:
    """True if this host has fast instructions for both; AMD's Zen 1 and Zen 2 take about a hundred cycles."""
    slow = llvm.get_host_cpu_name() in ("znver1", "znver2")
    return platform.machine() in ("x86_64", "AMD64") and bool(llvm.get_host_cpu_features().get("bmi2")) and not slow


HAS_INSTRUCTIONS = _has_instructions()
MOVES_BYTES = HAS_INSTRUCTIONS and bool(llvm.get_host_cpu_features().get("avx512vbmi2"))
squeeze = _instruction("llvm.x86.bmi.pext.64") if HAS_INSTRUCTIONS else squeeze_by_shifts
spread = _instruction("llvm.x86.bmi.pdep.64") if HAS_INSTRUCTIONS else spread_by_shifts
