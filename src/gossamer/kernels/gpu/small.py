"""A byte for each element: a program holds a few buckets whole, and reads them once."""

# Triton's language is not typed Python.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.forms import Form, Steps
from gossamer.kernels.gpu.hashing import fraction, words
from gossamer.kernels.gpu.options import OPTIONS
from gossamer.kernels.layout import units

_STRETCH = 2048  # elements of one program, or one bucket


def encode(
    x: Tensor, form: Form, steps: Steps, bucket: int, key: tuple[int, int] | None, tops: Tensor, wire: Tensor
) -> None:
    n = x.numel()
    if n:
        rows, columns = _shape(bucket)
        grid = (triton.cdiv(tops.numel(), rows),)
        counter, k1 = words(key or (0, 0), 0)
        _encode[grid](
            x, tops, wire, n, bucket, *steps, form.top, form.least, counter, k1,
            key is not None, form.mantissa, rows, columns, **OPTIONS,
        )  # fmt: skip


def read(wire: Tensor, form: Form, bucket: int, tops: Tensor, weight: float, out: Tensor, anew: bool) -> None:
    n = out.numel()
    if n:
        rows, columns = _shape(bucket)
        grid = (triton.cdiv(tops.numel(), rows),)
        unit = units(tops, weight, int(form.top))
        _read[grid](wire, unit, out, n, bucket, form.least, anew, form.mantissa, rows, columns, **OPTIONS)


def _shape(bucket: int) -> tuple[int, int]:
    columns = max(triton.next_power_of_2(bucket), 16)
    return max(_STRETCH // columns, 1), columns


@triton.jit
def _places(n, bucket, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Where a program begins, the places of its elements from there, and which of them there are."""
    first = tl.program_id(0).to(tl.int64) * ROWS * bucket
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    place = row * bucket + column
    left = tl.minimum(n - first, ROWS * bucket).to(tl.int32)
    return first, place, (column < bucket) & (place < left)


@triton.jit(do_not_specialize=["add", "mask", "plus", "lift", "most", "least", "counter", "k1"])
def _encode(
    x, tops, wire, n, bucket, add, mask, plus, lift, most, least, counter, k1,
    DICE: tl.constexpr, MANTISSA: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first, place, inside = _places(n, bucket, ROWS, COLUMNS)
    values = tl.load(x + first + place, mask=inside, other=0.0)
    bits = values.to(tl.int32, bitcast=True)
    largest = tl.minimum(tl.max(bits & 0x7FFFFFFF, 1), 0x7F800000)
    top = (((largest + add) & mask) + plus).to(tl.float32, bitcast=True)
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(tops + own, top, mask=own.to(tl.int64) * bucket < n)
    gain = tl.where(top < 2.0**-100, 0.0, tl.div_rn(lift + tl.zeros_like(top), top))
    small = tl.abs(values) * gain[:, None]
    small = tl.where(small < most, small, most)
    exponent = tl.maximum(small.to(tl.int32, bitcast=True) >> 23, least)
    steps = small * ((254 + MANTISSA - exponent) << 23).to(tl.float32, bitcast=True)
    if DICE:
        random = fraction((first + place).to(tl.uint32) + counter.to(tl.uint32), k1)
        whole = ((steps * 8388608.0).to(tl.int32) + random) >> 23
    else:
        whole = ((steps + 12582912.0) - 12582912.0).to(tl.int32)
    code = ((exponent - least) << MANTISSA) + whole + ((bits >> 31) & 128)
    tl.store(wire + first + place, code.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["least"])
def _read(
    wire, units, out, n, bucket, least,
    ANEW: tl.constexpr, MANTISSA: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first, place, inside = _places(n, bucket, ROWS, COLUMNS)
    code = tl.load(wire + first + place, mask=inside, other=0).to(tl.int32)
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    unit = tl.load(units + own, mask=own.to(tl.int64) * bucket < n, other=0.0)
    exponent = (code & 127) >> MANTISSA
    steps = (code & ((1 << MANTISSA) - 1)) + tl.where(exponent > 0, 1 << MANTISSA, 0)
    power = ((tl.maximum(exponent, 1) + (least - MANTISSA - 1)) << 23).to(tl.float32, bitcast=True)
    said = steps.to(tl.float32) * power
    said = tl.where(code < 128, said, -said)
    old = 0.0 if ANEW else tl.load(out + first + place, mask=inside, other=0.0)
    tl.store(out + first + place, old + unit[:, None] * said, mask=inside)
