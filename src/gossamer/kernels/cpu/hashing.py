"""The hash of element indices, and stochastic rounding with it, there and back.

Every operation is cast back, because Numba widens 32-bit arithmetic to 64 bits.
"""

from collections.abc import Callable

import numpy as np

from gossamer.core.rng import Key
from gossamer.kernels.cpu.compile import Bytes, Floats, inlined, kernel, variant, wide
from gossamer.kernels.layout import TINY

Start = tuple[np.uint32, np.uint32]  # the first counter and the second key word


@kernel
def fraction(counter: np.uint32, k1: np.uint32) -> np.int32:
    """The top 23 bits of a word."""
    return np.int32(np.uint32(word(counter, k1) >> np.uint32(9)))


@kernel
def word(counter: np.uint32, k1: np.uint32) -> np.uint32:
    """mix3; `counter` has the first key word already added."""
    x = np.uint32(counter ^ np.uint32(counter >> np.uint32(17)))
    x = np.uint32(x * np.uint32(0xED5AD4BB))
    x = np.uint32(x ^ np.uint32(x >> np.uint32(11)))
    x = np.uint32(x + k1)
    x = np.uint32(x * np.uint32(0xAC4C1B51))
    x = np.uint32(x ^ np.uint32(x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x31848BAB))
    return np.uint32(x ^ np.uint32(x >> np.uint32(14)))


def start(key: Key) -> Start:
    return np.uint32(key[0] & 0xFFFFFFFF), np.uint32(key[1])


@kernel
def gain_of(scale: np.float32, top: np.float32) -> np.float32:
    """Like `layout.gains` for one scale; divides as torch divides a number by a tensor."""
    return np.float32(0) if scale < np.float32(TINY) else np.float32(np.float32(1) / scale) * top


@kernel
def unit_of(scale: np.float32, weight: np.float32, top: np.float32) -> np.float32:
    """Like `layout.units` for one scale."""
    unit = np.float32(np.float32(scale * weight) / top)
    return np.float32(unit + np.float32(unit - unit))


@kernel
def round_codes(
    x: Floats, a: int, b: int, gain: np.float32, top: np.int32, base: np.int32, key: Start, out: Bytes, begin: int
) -> None:
    """out[begin:] = (clamp(int32(x[a:b] * gain), -top, top) + base + fraction) >> 23; NaN ends at the top.

    Ranges instead of slices, which count references; unsigned indices, which need no code for negative ones.
    """
    wide()
    limit = np.float32(top)
    counter = np.uint32(key[0] + np.uint32(a))
    for j in range(b - a):
        fixed = np.float32(x[np.uint64(a + j)] * gain)
        fixed = fixed if fixed < limit else limit
        fixed = fixed if fixed > -limit else -limit
        random = fraction(np.uint32(counter + np.uint32(j)), key[1])
        out[np.uint64(begin + j)] = np.uint8(np.int32(np.int32(np.int32(fixed) + base) + random) >> np.int32(23))


def _reader(anew: bool) -> Callable[[Bytes, int, np.int32, np.float32, Floats, int, int], None]:
    """Compile a reader that writes decoded codes to `out`, or adds them; writing adds to 0.0, so that there is no -0.0."""

    def read(codes: Bytes, begin: int, shift: np.int32, unit: np.float32, out: Floats, a: int, b: int) -> None:
        wide()
        for j in range(b - a):
            level = np.int32(np.int32(codes[np.uint64(begin + j)]) - shift)
            old = np.float32(0) if anew else out[np.uint64(a + j)]
            out[np.uint64(a + j)] = old + unit * np.float32(level)

    return variant(read, anew)


_put, _add = _reader(True), _reader(False)


@kernel
def read_codes(
    codes: Bytes, begin: int, shift: np.int32, unit: np.float32, out: Floats, a: int, b: int, anew: bool
) -> None:
    """out[a:b] = unit * (codes[begin:] - shift), or adds that."""
    inlined()
    if anew:
        _put(codes, begin, shift, unit, out, a, b)
    else:
        _add(codes, begin, shift, unit, out, a, b)
