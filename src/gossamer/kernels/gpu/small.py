"""Eight-bit numbers: a program holds a few whole buckets, and reads them once."""

# Triton's language is not typed Python.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportReturnType=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.core.rng import Key
from gossamer.kernels.forms import Form, Steps, raised
from gossamer.kernels.gpu import OPTIONS
from gossamer.kernels.gpu.hashing import word, words

_STRETCH = 2048  # elements of one program, or one bucket


def encode(x: Tensor, form: Form, steps: Steps, bucket: int, key: Key | None, tops: Tensor, wire: Tensor) -> None:
    n = x.numel()
    if n:
        rows, columns = _shape(bucket)
        grid = (triton.cdiv(tops.numel(), rows),)
        counter, k1 = words(key or (0, 0))
        _encode[grid](
            x, tops, wire, n, bucket, *steps, form.top, form.least, raised(form), counter, k1,
            key is not None, tops.dtype == torch.uint8, form.flat, form.mantissa, rows, columns, num_warps=_warps(columns), **OPTIONS,
        )  # fmt: skip


def read(wire: Tensor, form: Form, bucket: int, tops: Tensor, weight: float, out: Tensor, anew: bool) -> None:
    n = out.numel()
    if n:
        rows, columns = _shape(bucket)
        grid = (triton.cdiv(tops.numel(), rows),)
        _read[grid](
            wire, tops, out, n, bucket, weight, form.top, form.least, raised(form), form.fraction,
            anew, tops.dtype == torch.uint8, form.flat, form.mantissa, rows, columns, num_warps=_warps(columns), **OPTIONS,
        )  # fmt: skip


def _warps(columns: int) -> int:
    """Number of warps, enough to hold a long bucket in registers."""
    return 8 if columns > _STRETCH else 4


def _shape(bucket: int) -> tuple[int, int]:
    columns = max(triton.next_power_of_2(bucket), 16)
    return max(_STRETCH // columns, 1), columns


@triton.jit
def _places(n, bucket, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """First position of a program, offsets of its elements, and the mask of those that exist."""
    first = tl.program_id(0).to(tl.int64) * ROWS * bucket
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    place = row * bucket + column
    left = tl.minimum(n - first, ROWS * bucket).to(tl.int32)
    return first, place, (column < bucket) & (place < left)


@triton.jit(do_not_specialize=["add", "mask", "plus", "lift", "most", "least", "raised", "counter", "k1"])
def _encode(
    x, tops, wire, n, bucket, add, mask, plus, lift, most, least, raised, counter, k1,
    DICE: tl.constexpr, POWERS: tl.constexpr, FLAT: tl.constexpr, MANTISSA: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first, place, inside = _places(n, bucket, ROWS, COLUMNS)
    values = tl.load(x + first + place, mask=inside, other=0.0)
    largest = tl.minimum(tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0x7F800000)
    bits = ((largest + add) & mask) + plus
    top = bits.to(tl.float32, bitcast=True)
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    said = top
    if POWERS:
        field = bits >> 23
        said = tl.where(field == 255, 255, tl.maximum(field - raised, 0)).to(tl.uint8)
    tl.store(tops + own, said, mask=own.to(tl.int64) * bucket < n)
    # The rounding of this is that of a division in 32 bits.
    exact = (lift + tl.zeros_like(top)).to(tl.float64) / top.to(tl.float64)
    gain = tl.where(top < 2.0**-100, 0.0, exact.to(tl.float32))
    y = values * gain[:, None]
    y = tl.where(y < most, y, most)
    y = tl.where(y > -most, y, -most)
    random = tl.zeros_like(place)
    if DICE:
        random = _fraction(first, place, bucket, counter, k1, COLUMNS)
    code = _whole(y, random, DICE) if FLAT else _floating(y, values, random, least, DICE, MANTISSA)
    tl.store(wire + first + place, code.to(tl.uint8), mask=inside)


@triton.jit
def _fraction(first, place, bucket, counter, k1, COLUMNS: tl.constexpr):
    """Random bits of each element; two elements of a run share one random word."""
    run = tl.minimum(bucket, 128)
    half = (run + 1) // 2
    second = tl.arange(0, COLUMNS)[None, :] % run >= half
    places = (first + place - tl.where(second, half, 0)).to(tl.uint32)
    random = word(places + counter.to(tl.uint32), k1)
    return (tl.where(second, random << 7, random >> 9) & 0x7FFF80 | 64).to(tl.int32)


@triton.jit
def _whole(y, random, DICE: tl.constexpr):
    if DICE:
        return ((y * 8388608.0).to(tl.int32) + random) >> 23
    return (y + 12582912.0).to(tl.int32, bitcast=True)  # of which the lowest byte counts


@triton.jit
def _floating(y, x, random, least, DICE: tl.constexpr, MANTISSA: tl.constexpr):
    y = tl.abs(y)
    if DICE:
        # What lies below the least exponent is moved up by its power, and is as evenly spaced there.
        power = ((least + tl.zeros_like(random)) << 23).to(tl.float32, bitcast=True)
        raised = tl.where(y < power, y + power, y)
        below = tl.where(y < power, least, least - 1) << MANTISSA
        code = ((raised.to(tl.int32, bitcast=True) + (random >> MANTISSA)) >> (23 - MANTISSA)) - below
    else:
        exponent = tl.maximum(y.to(tl.int32, bitcast=True) >> 23, least)
        ruler = (exponent + (23 - MANTISSA)) << 23  # its last digit is the spacing
        steps = (y + ruler.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - ruler
        code = ((exponent - least) << MANTISSA) + steps
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 128)


@triton.jit(do_not_specialize=["weight", "most", "least", "raised", "fraction"])
def _read(
    wire, tops, out, n, bucket, weight, most, least, raised, fraction,
    ANEW: tl.constexpr, POWERS: tl.constexpr, FLAT: tl.constexpr, MANTISSA: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first, place, inside = _places(n, bucket, ROWS, COLUMNS)
    code = tl.load(wire + first + place, mask=inside, other=0).to(tl.int32)
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    top = tl.load(tops + own, mask=own.to(tl.int64) * bucket < n, other=0)
    if POWERS:
        power = top.to(tl.int32)
        field = tl.minimum(tl.where(power == 255, 255, power + raised), 255)
        top = tl.where(field == 255, 0x7F800000, (field << 23) + fraction).to(tl.float32, bitcast=True)
    # The rounding of this is that of a division in 32 bits.
    exact = (top * weight).to(tl.float64) / (most + tl.zeros_like(top)).to(tl.float64)
    unit = exact.to(tl.float32)
    unit = unit + (unit - unit)  # as `layout.units`
    if FLAT:
        said = ((code << 24) >> 24).to(tl.float32)
    else:
        size = (code & 127) << (23 - MANTISSA)
        low = size < 8388608  # below the least exponent: as many steps, less the power that comes with it
        power = (least + tl.zeros_like(code)) << 23
        raised = (size + tl.where(low, power, power - 8388608)).to(tl.float32, bitcast=True)
        said = raised - tl.where(low, power.to(tl.float32, bitcast=True), 0.0)
        said = tl.where(code < 128, said, -said)
    old = 0.0 if ANEW else tl.load(out + first + place, mask=inside, other=0.0)
    tl.store(out + first + place, old + unit[:, None] * said, mask=inside)
