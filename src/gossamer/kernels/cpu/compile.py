"""Compiles all Numba loops with the same options, and adds what Numba lacks of LLVM.

That is hints, which change speed and never a result, and a few instructions.
"""

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core.caching import IndexDataCacheFile
from numba.extending import intrinsic

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Rows = Bytes  # two dimensions: (blocks, width)
Blocks = Bytes  # three dimensions: (blocks, rows, width)
Stack = Floats  # three dimensions: (blocks, rows, width)

_LINE = 64  # bytes per cache line

P = ParamSpec("P")
R = TypeVar("R")


class _EntryFiles(IndexDataCacheFile):
    """What a kernel was compiled to, for some types of arguments, in a file of its own that is named by them.

    Numba numbers these files, and lists them in one more. Of two processes that compile a kernel for two types at once, one may
    list the file that the other writes, and a third then runs what was compiled for other types.
    """

    def save(self, key: Any, data: Any) -> None:
        self._save_data(self._name(key), (self._source_stamp, data))

    def load(self, key: Any) -> Any:
        try:
            stamp, data = self._load_data(self._name(key))
        except OSError:
            return None
        return data if stamp == self._source_stamp else None

    def _name(self, key: Any) -> str:
        return self._data_name(int(sha256(repr((self._version, key)).encode()).hexdigest()[:32], 16))


@cache
def _sources() -> str:
    """A hash of all files that kernels are compiled from. Numba looks at a kernel's own, and it may call another's."""
    here = Path(__file__).parent
    return sha256(
        b"".join(path.read_bytes() for path in sorted([*here.glob("*.py"), *here.parent.glob("*.py")]))
    ).hexdigest()


def _compiled(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    made: Any = numba.njit(nogil=True, cache=True, **options)(function)
    if held := getattr(made, "_cache", None):  # None under NUMBA_DISABLE_JIT
        stamp = held._impl.locator.get_source_stamp(), _sources()
        held._cache_file = _EntryFiles(held._cache_path, held._impl.filename_base, stamp)
    return made


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles for this host without fast-math: results must not depend on how a loop was vectorised.

    To divide by zero is no error, as it is none in torch; loops that would look for it are not vectorised.
    """
    return _compiled(function, error_model="numpy")


def variant(function: Callable[P, R], *settings: int) -> Callable[P, R]:
    """Compile a kernel that is made anew for each of some settings, under a name of its own.

    A compiled kernel is known by its name, the types of its arguments, and how many its process had compiled before it. Of two
    of one name that two processes have compiled and cached, a third one may run the first for the second.
    """
    function.__qualname__ = "_".join(map(str, (function.__name__, *map(int, settings))))
    return kernel(function)


def reduction(function: Callable[P, R]) -> Callable[P, R]:
    """Like `kernel`, but the additions of a sum may be reordered, in a way that is fixed on one host."""
    return _compiled(function, fastmath={"reassoc"})


def _wide(context: Any) -> Any:
    """Ask LLVM for the widest vectors, when called in a kernel; on some hosts it prefers half of that.

    Measured on an AVX-512 Xeon: the hash-bound encoders run 1.5 times as fast.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        attributes = builder.function.attributes
        if isinstance(attributes, set):  # llvmlite has no name for this one, so it goes in by the side door
            set.add(attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.none(), generate


wide = cast(Callable[[], None], intrinsic(_wide))


def _inlined(context: Any) -> Any:
    """Inline the kernel that calls it into its callers, so that constant arguments are known in it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.function.attributes.add("alwaysinline")
        return context.get_dummy_value()

    return types.none(), generate


inlined = cast(Callable[[], None], intrinsic(_inlined))


@kernel
def prefetch(x: Any, start: int, stop: int) -> None:
    """Prefetch x[start:stop] into the cache, while the kernel works on the stretch before it.

    Measured: a hash-bound encoder gains a quarter, since waiting and computing then overlap.
    """
    for index in range(start, min(stop, x.size), _LINE // x.itemsize):
        _prefetch(x, index)


def _touch(context: Any, x: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        address = builder.bitcast(builder.gep(data, [arguments[1]]), pointer)
        kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        known = builder.module.globals.get("llvm.prefetch.p0")
        hint = known or ir.Function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(hint, [address, word(0), word(3), word(1)])  # a read, wanted in every level, data
        return context.get_dummy_value()

    return types.none(x, index), generate


_prefetch = cast(Callable[[Any, int], None], intrinsic(_touch))


def _lowest(context: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


lowest_bit = cast(Callable[[np.uint64], np.uint64], intrinsic(_lowest))  # the place of a word's lowest bit; it has one


def _as_int(context: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


def _as_float(context: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


bits_of = cast(Callable[[np.float32], np.int32], intrinsic(_as_int))
float_of = cast(Callable[[np.int32], np.float32], intrinsic(_as_float))
