"""The position of every bit of a wire: arithmetic that all backends share, and checks of what they are given.

All wires are planar. A vector is cut into blocks; inside a block whose rows are `width` bytes wide, byte j holds the
elements j, j + width, j + 2 * width, ... so that loads, arithmetic and stores are contiguous on every machine.
The last, shorter block follows the same rule with the smallest width that holds it.
"""

from functools import lru_cache
from itertools import accumulate, pairwise
from math import comb
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossamer.core.errors import WireError
from gossamer.core.rng import Key

Bounds = tuple[int, ...]

TRITS = 5  # trits per byte: 3 ** 5 = 243 <= 256
TERNARY_BLOCK = 64 * TRITS
PLANE_BLOCK = 64 * 8  # in a full block a plane of width w takes 64 * w bytes
SUM_GROUP = 64 * 64  # elements whose magnitudes are added row after row of 64
INDEX_BLOCK = 128  # gaps that share one Rice parameter
LEVEL_BLOCK = 256  # levels that share one
LEVEL_RECORD = 4096  # levels whose bits lie together
LEVEL_MOST = LEVEL_RECORD * 9 // 8  # bytes of a record: a parameter that says all bits costs one more than they
LEVEL_ZEROS = 255  # the parameter of a block in which all are zero
SIGN_WORDS = 64  # words of 32 random signs; element j of a stretch has bit 31 - j // 64 of word j % 64
SIGNS = 32 * SIGN_WORDS

ROTATED_LEAST = 64  # elements of the shortest block that is rotated, and of the longest
ROTATED_MOST = 4096
ROTATED_LONGEST = 1 << 31  # elements of a vector whose signs have numbers of their own
SECOND_SIGNS = 1 << 26  # the second rotation's words of signs begin so many after the first's

ONE = 1 << 23  # fixed-point one of the stochastic rounding: 23 fraction bits, as many as float32 has
GUARD = ONE + 4  # the gain is a touch larger, so that |x| == scale never rounds below its level
TINY = 2.0**-100  # scales below this would overflow the gain; such values are written as zero


class CorruptWire(WireError):
    """Received bytes do not have the length or content that their header and the receiver's shapes require."""


def require_length(name: str, wire: Tensor, expected: int) -> None:
    """Raise CorruptWire if a wire has the wrong length; called before it is read."""
    require_vector("wire", wire, torch.uint8)
    if wire.numel() != expected:
        raise CorruptWire(f"{name}: expected {expected} bytes, got {wire.numel()}")


def require_vector(name: str, x: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Raise TypeError unless x is a contiguous vector of the right type, since kernels access raw memory."""
    if x.dtype != dtype or x.dim() != 1 or not x.is_contiguous():
        found = f"{x.dtype} of shape {tuple(x.shape)}"
        raise TypeError(f"{name} must be a contiguous 1-D {dtype} tensor, got {found}")


def require_count(name: str, x: Tensor, expected: int) -> None:
    """Raise ValueError unless a table (scales, norms) has one entry per segment or bucket."""
    if x.numel() != expected:
        raise ValueError(f"{name} must have {expected} entries, got {x.numel()}")


def planes(bits: int) -> tuple[int, ...]:
    """Power-of-two widths that add up to `bits`, widest first; the first plane holds the lowest code bits."""
    if not 1 <= bits <= 8:
        raise ValueError(f"bits must be between 1 and 8, got {bits}")
    return tuple(width for width in (8, 4, 2, 1) if bits & width)


@lru_cache(maxsize=4096)
def plane_bytes(n: int, bits: int) -> int:
    """Bytes of n codes of `bits` bits."""
    full, tail = divmod(n, PLANE_BLOCK)
    return full * 64 * bits + sum(-(-tail * width // 8) for width in planes(bits))


def levels_of(bits: int) -> int:
    """Largest level s of a `bits`-bit code: 2 ** (bits - 1) - 1, and 1 for the two points of a one-bit code."""
    return max((1 << (bits - 1)) - 1, 1)


def middle_of(bits: int) -> float:
    """The code of zero, or what would be: half of the largest code."""
    return 0.5 if bits == 1 else levels_of(bits)


def gains(scales: Tensor, top: float) -> Tensor:
    """Per-segment factor that turns |x| = scale into `top` fixed-point units; 0 where the scale is 0 or tiny."""
    return ((top * GUARD) / scales).masked_fill_(scales < TINY, 0.0)


def units(scales: Tensor, weight: float, top: int) -> Tensor:
    """Per-segment value of one level, weight * scale / top in float32; NaN when that is not finite."""
    unit = scales * weight if top == 1 else scales * weight / divisor(top, scales.device)
    return unit + (unit - unit)  # inf - inf is NaN, and NaN stays


@lru_cache(maxsize=1024)
def edges(bounds: Bounds) -> npt.NDArray[np.int64]:
    """Checked segment boundaries as an array; cached because a model has a few tables and many steps."""
    if not bounds or bounds[0] != 0 or any(a > b for a, b in pairwise(bounds)):
        raise ValueError(f"bounds must start at 0 and not decrease, got {bounds[:8]}")
    table = np.array(bounds, dtype=np.int64)
    table.flags.writeable = False
    return table


# Tables on a device are copied from the host, which waits for it: so any stream may read them, and they are made once.


@lru_cache(maxsize=1024)
def edges_on(bounds: Bounds, device: torch.device) -> Tensor:
    """Segment boundaries as a tensor on a device."""
    return torch.tensor(bounds, dtype=torch.int64, device=device)


@lru_cache(maxsize=1024)
def lengths_on(bounds: Bounds, device: torch.device) -> Tensor:
    """The length of each segment, as a tensor on a device."""
    return torch.tensor(np.diff(np.array(bounds, dtype=np.int64)), device=device)


@lru_cache(maxsize=256)
def divisor(number: float, device: torch.device) -> Tensor:
    """A divisor as a tensor: on GPUs torch would replace division by a Python number with a multiplication.

    What is read from a wire is the same everywhere, to the bit. Means over ranks are not: networks add in orders of their
    own, so those are divided by plain numbers.
    """
    return torch.tensor(float(number), dtype=torch.float32, device=device)


def require_bounds(bounds: Bounds, n: int) -> int:
    """Number of segments, after checking that they cover exactly n elements."""
    if int(edges(bounds)[-1]) != n:
        raise ValueError(f"bounds end at {bounds[-1]} but there are {n} elements")
    return len(bounds) - 1


class Turns(NamedTuple):
    """The rotation of a vector's layers in each row of a count sketch, and the positions of its random numbers.

    Hash number row * layers + layer says by how much a row turns a layer: its 23 top bits, as a fraction of the columns.
    The numbers after those are words of signs, `words` of them for each layer of each row.
    """

    n: int
    rows: int
    columns: int
    key: Key

    @property
    def layers(self) -> int:
        return -(-self.n // self.columns)

    @property
    def words(self) -> int:
        return -(-self.columns // SIGNS) * SIGN_WORDS

    @property
    def first_word(self) -> int:
        return self.rows * self.layers

    @property
    def hashes(self) -> int:
        return self.first_word * (1 + self.words)


class Coded(NamedTuple):
    """The positions of the records of levels: behind the length of each (2 bytes) and the parameter of each block (1).

    What is left over when whole words of 64 levels are cut off is a record of its own.
    """

    n: int
    levels: int

    @property
    def records(self) -> int:
        return self._cut(LEVEL_RECORD)

    @property
    def blocks(self) -> int:
        return self._cut(LEVEL_BLOCK)

    @property
    def first(self) -> int:
        """Position of the first record."""
        return 2 * self.records + self.blocks

    @property
    def bits(self) -> int:
        """Bits of the largest number that is written."""
        return (2 * self.levels).bit_length()

    @property
    def most(self) -> int:
        """Upper bound of all bytes: a block's shortest code has at most the bits of its numbers, plus one each."""
        return self.first + self.records + self.n * (self.bits + 1) // 8

    def _cut(self, length: int) -> int:
        return -(-(self.n // 64 * 64) // length) + (self.n % 64 > 0)


class Rotation(NamedTuple):
    """How rotated blocks are written: the bits of a code, and the elements of a block."""

    bits: int
    block: int


class Rotated(NamedTuple):
    """The blocks of a vector that is rotated: `block` elements as often as they fit, then half, a quarter, ... down to 64.

    Of the shorter ones there is one each at most. Less than 64 elements are left over, which are in no block.
    """

    n: int
    block: int

    @property
    def inside(self) -> int:
        """Elements in blocks."""
        return self.n // ROTATED_LEAST * ROTATED_LEAST

    @property
    def blocks(self) -> int:
        return self.n // self.block + (self.n % self.block // ROTATED_LEAST).bit_count()

    @property
    def stretches(self) -> list[tuple[int, int, int]]:
        """Where blocks of one size begin, how many there are, and their size.

        >>> Rotated(5000, 1024).stretches
        [(0, 4, 1024), (4096, 1, 512), (4608, 1, 256), (4864, 1, 128)]
        """
        out, begin, size = list[tuple[int, int, int]](), 0, self.block
        while size >= ROTATED_LEAST:
            count = (self.n - begin) // size
            if count:
                out.append((begin, count, size))
            begin, size = begin + count * size, size // 2
        return out


class Places(NamedTuple):
    """How `keep` of the places from 0 to n - 1 are written: so many low bits of each, then all high parts.

    These are a row of bits, with a one for each place, or where that is shorter one number, of 256 bits at most.
    """

    keep: int
    n: int

    @property
    def low(self) -> int:
        """Low bits of a place: the fewest of those that make a row shortest."""
        return _shortest(self.keep, self.n).low

    @property
    def low_bits(self) -> int:
        return self.low * self.keep

    @property
    def number_bits(self) -> int:
        """Bits of the number that says all high parts; 0 where they are a row of bits."""
        return _shortest(self.keep, self.n).number

    @property
    def words(self) -> int:
        """Words of 32 bits that hold the number."""
        return -(-self.number_bits // 32)

    @property
    def most(self) -> int:
        """The largest high part; without low bits, of which no two places have the same, less the places before it."""
        return _most(self.keep, self.n, self.low)

    @property
    def row_bytes(self) -> int:
        return _shortest(self.keep, self.n).bytes


class _Row(NamedTuple):
    bytes: int
    number: int
    bits: int
    low: int


_LARGEST, _LONGEST_NUMBER = 512, 256  # of high parts and of places that a number counts; bits of a number


def _most(keep: int, n: int, low: int) -> int:
    return (n - 1) >> low if low else n - keep


@lru_cache(maxsize=1024)
def _shortest(keep: int, n: int) -> _Row:
    """A row of bits where a number would be no shorter: it is faster."""
    if keep == n:
        return _Row(0, 0, 0, 0)
    rows = list[_Row]()
    for low in range(n.bit_length() + 1):
        ones = low * keep + keep + ((n - 1) >> low)
        rows.append(_Row(-(-ones // 8), 0, ones, low))
        most = _most(keep, n, low)
        if not 0 < most <= _LARGEST or keep > _LARGEST:
            continue
        bits = (comb(keep + most, keep) - 1).bit_length()
        if bits <= _LONGEST_NUMBER:
            rows.append(_Row(-(-(low * keep + bits) // 8), bits, low * keep + bits, low))
    return min(rows)


@lru_cache(maxsize=64)
def binomials(form: Places, device: torch.device) -> Tensor:
    """C(d + j, j + 1) of place j and high part d (three dimensions, int64): words of 32 bits, the lowest first.

    The number of high parts d_0 <= d_1 <= ... is the sum of these over j: all sets of so many, some of which may be the same, have
    numbers from 0 on, without a gap. The last part is the largest one whose coefficient is no larger than the number, and
    what is left is the number of the others.

    >>> binomials(Places(3, 9), torch.device("cpu"))[:, :, 0].tolist()
    [[0, 1, 2, 3, 4, 5, 6], [0, 1, 3, 6, 10, 15, 21], [0, 1, 4, 10, 20, 35, 56]]
    """
    row, written = [1] * (form.most + 1), bytearray()
    for _ in range(form.keep):
        row = [0, *accumulate(row[1:])]  # C(d + j, j + 1) is the sum of C(e + j - 1, j) for e from 1 to d
        written += b"".join(number.to_bytes(4 * form.words, "little") for number in row)
    words = np.frombuffer(bytes(written), dtype="<u4").reshape(form.keep, form.most + 1, form.words)
    return torch.as_tensor(words.astype(np.int64), device=device)
