"""Eight-bit numbers: measures a bucket, and rounds it while it is still in cache.

Kernels are compiled for one form, and for the usual length of buckets: loops of a length that the compiler knows take half
the time. What they close over is plain values, or they would not be found in the cache.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gossamer.core.rng import Key
from gossamer.kernels.cpu.compile import (
    Bytes,
    Floats,
    Ints,
    bits_of,
    float_of,
    inlined,
    kernel,
    prefetch,
    variant,
    wide,
)
from gossamer.kernels.cpu.hashing import Start, start, unit_of, word
from gossamer.kernels.cpu.scales import top_between
from gossamer.kernels.forms import CENTRE, INFINITE, RUN, Form, Steps, raised
from gossamer.kernels.layout import TINY

Encode = Callable[[Floats, Ints, int, Steps, Start, Floats | Bytes, Bytes], None]
Read = Callable[[Bytes, int, Floats | Bytes, np.float32, Floats], None]

_AHEAD = 4096  # elements that are asked for before they are needed
_USUAL = (128, 4096)  # elements of a bucket
_TO_WHOLE = 3 * 2.0**22  # added to a number, leaves no bits behind the point


def encode(x: Tensor, form: Form, steps: Steps, bucket: int, key: Key | None, tops: Tensor, wire: Tensor) -> None:
    write = _encoder(form, key is not None, _usual(bucket), tops.dtype == torch.uint8)
    values = x.detach().numpy()
    write(values, values.view(np.int32), bucket, steps, start(key or (0, 0)), tops.numpy(), wire.numpy())


def read(wire: Tensor, form: Form, bucket: int, tops: Tensor, weight: float, out: Tensor, anew: bool) -> None:
    say = _reader(form, _usual(bucket), anew, tops.dtype == torch.uint8)
    say(wire.numpy(), bucket, tops.numpy(), np.float32(weight), out.detach().numpy())


def _usual(bucket: int) -> int:
    """The bucket length to compile for; 0 for uncommon lengths."""
    return bucket if bucket in _USUAL else 0


class NumberRounding(NamedTuple):
    """How numbers become codes."""

    form: Form
    flat: bool  # all numbers of the form are evenly spaced
    rng: bool  # rounded at random


@kernel
def _whole(x: np.float32, gain: np.float32, random: np.int32, form: Form, rng: bool) -> np.int32:
    """The code of an evenly spaced form, from x, its factor and 23 random bits."""
    inlined()
    y, top = np.float32(x * gain), np.float32(form.top)
    y = y if y < top else top
    y = y if y > -top else -top
    if rng:
        return np.int32(np.int32(np.int32(np.float32(y * np.float32(1 << 23))) + random) >> np.int32(23))
    return bits_of(np.float32(y + np.float32(_TO_WHOLE)))  # of which the lowest byte counts


@kernel
def _floating(x: np.float32, gain: np.float32, random: np.int32, form: Form, rng: bool) -> np.int32:
    """The code of a form with an exponent."""
    inlined()
    m, least, top = np.int32(form.mantissa), np.int32(form.least), np.float32(form.top)
    y = np.float32(np.abs(x) * gain)
    y = y if y < top else top
    if rng:
        # What lies below the least exponent is moved up by its power, and is as evenly spaced there.
        power = float_of(np.int32(least << np.int32(23)))
        raised = np.float32(y + power) if y < power else y
        below = np.int32(least << m) if y < power else np.int32(np.int32(least - np.int32(1)) << m)
        bits = np.int32(bits_of(raised) + np.int32(random >> m))
        code = np.int32(np.int32(bits >> np.int32(np.int32(23) - m)) - below)
    else:
        exponent = max(np.int32(bits_of(y) >> np.int32(23)), least)
        # The ruler's last digit is the spacing.
        ruler = np.int32(np.int32(exponent + np.int32(np.int32(23) - m)) << np.int32(23))
        steps = np.int32(bits_of(np.float32(y + float_of(ruler))) - ruler)
        code = np.int32(np.int32(np.int32(exponent - least) << m) + steps)
    return np.int32(code | np.int32(np.int32(bits_of(x) >> np.int32(24)) & np.int32(128)))


@kernel
def _code(x: np.float32, gain: np.float32, random: np.uint32, way: NumberRounding) -> np.uint8:
    inlined()
    fraction = np.int32(np.uint32(random & np.uint32(0x7FFF80)) | np.uint32(CENTRE))
    if way.flat:
        return np.uint8(_whole(x, gain, fraction, way.form, way.rng))
    return np.uint8(_floating(x, gain, fraction, way.form, way.rng))


@kernel
def _pairs(
    x: Floats, a: int, length: int, half: int, gain: np.float32, key: Start, way: NumberRounding, out: Bytes
) -> None:
    """Encode pairs of elements, which share one random word."""
    wide()
    inlined()
    for j in range(length):
        i, k = np.uint64(a + j), np.uint64(a + half + j)
        random = word(np.uint32(key[0] + np.uint32(i)), key[1]) if way.rng else np.uint32(0)
        out[i] = _code(x[i], gain, np.uint32(random >> np.uint32(9)), way)
        out[k] = _code(x[k], gain, np.uint32(random << np.uint32(7)), way)


@kernel
def _alone(x: Floats, a: int, b: int, gain: np.float32, key: Start, way: NumberRounding, out: Bytes) -> None:
    inlined()
    for j in range(b - a):
        i = np.uint64(a + j)
        random = word(np.uint32(key[0] + np.uint32(i)), key[1]) if way.rng else np.uint32(0)
        out[i] = _code(x[i], gain, np.uint32(random >> np.uint32(9)), way)


@kernel
def _rest(x: Floats, a: int, b: int, run: int, gain: np.float32, key: Start, way: NumberRounding, out: Bytes) -> None:
    """Encode runs, of which the last one is not full."""
    inlined()
    half = (run + 1) // 2
    for lo in range(a, b, run):
        both = min(max(b - lo - half, 0), run - half)
        _pairs(x, lo, both, half, gain, key, way, out)
        _alone(x, lo + both, min(lo + half, b), gain, key, way, out)


@kernel
def _top(bits: Ints, a: int, length: int, steps: Steps) -> np.int32:
    """The top of a bucket as it is written, as the bits of a float32; infinity if an element is not finite."""
    inlined()
    largest = min(top_between(bits, a, a + length), np.int32(INFINITE))
    return np.int32(np.int32(np.int32(largest + steps.add) & steps.mask) + steps.plus)


@lru_cache(maxsize=64)
def _encoder(form: Form, rng: bool, known: int, powers: bool) -> Encode:
    way, up = NumberRounding(form, form.flat, rng), raised(form)

    def write(x: Floats, bits: Ints, length: int, steps: Steps, key: Start, tops: Floats | Bytes, out: Bytes) -> None:
        wide()
        bucket = known if known else length
        run = min(bucket, RUN)
        half = (run + 1) // 2
        second, runs, full = run - half, bucket // run, x.size // bucket
        for i in range(full):
            a = i * bucket
            prefetch(x, a + _AHEAD, a + bucket + _AHEAD)
            top = _top(bits, a, bucket, steps)
            tops[i] = _power_of(top, up) if powers else float_of(top)
            gain = _gain(float_of(top), np.float32(steps.lift))
            for r in range(runs):
                lo = a + r * run
                _pairs(x, lo, second, half, gain, key, way, out)
                if half > second:
                    _alone(x, lo + second, lo + half, gain, key, way, out)
            if runs * run < bucket:
                _rest(x, a + runs * run, a + bucket, run, gain, key, way, out)
        if full < tops.size:
            a = full * bucket
            top = _top(bits, a, x.size - a, steps)
            tops[full] = _power_of(top, up) if powers else float_of(top)
            _rest(x, a, x.size, run, _gain(float_of(top), np.float32(steps.lift)), key, way, out)

    return variant(write, form.mantissa, form.least, int(form.top), rng, known, powers)


@kernel
def _power_of(bits: np.int32, up: int) -> np.uint8:
    """Like `forms.squeezed`."""
    inlined()
    field = np.int32(bits >> np.int32(23))
    return np.uint8(255) if field == 255 else np.uint8(max(field - up, 0))


@kernel
def _top_of(power: np.uint8, up: int, fraction: int) -> np.float32:
    """Like `forms.stretched`."""
    inlined()
    field = 255 if power == 255 else min(int(power) + up, 255)
    return float_of(np.int32(INFINITE) if field == 255 else np.int32((field << 23) + fraction))


@kernel
def _gain(top: np.float32, lift: np.float32) -> np.float32:
    inlined()
    return np.float32(0) if top < np.float32(TINY) else np.float32(lift / top)


@kernel
def _meaning(code: np.int32, form: Form, flat: bool) -> np.float32:
    """The number that a code stands for, not yet scaled by its bucket's top."""
    inlined()
    if flat:
        return np.float32(code)
    m, least = np.int32(form.mantissa), np.int32(form.least)
    size = np.int32(np.int32(code & np.int32(127)) << np.int32(np.int32(23) - m))
    low = size < np.int32(1 << 23)  # below the least exponent: as many steps, less the power that comes with it
    power = np.int32(least << np.int32(23))
    raised = float_of(np.int32(size + (power if low else np.int32(power - np.int32(1 << 23)))))
    said = np.float32(raised - (float_of(power) if low else np.float32(0)))
    return float_of(np.int32(bits_of(said) | np.int32(code & np.int32(-(1 << 31)))))


@kernel
def _say(wire: Bytes, a: int, length: int, unit: np.float32, form: Form, flat: bool, anew: bool, out: Floats) -> None:
    """Write decoded codes to `out`, or add them; writing adds to 0.0, so that there is no -0.0."""
    wide()
    inlined()
    for j in range(length):
        i = np.uint64(a + j)
        said = np.float32(unit * _meaning(np.int32(np.int8(wire[i])), form, flat))
        out[i] = np.float32(0) + said if anew else out[i] + said


@lru_cache(maxsize=64)
def _reader(form: Form, known: int, anew: bool, powers: bool) -> Read:
    flat, up, fraction = form.flat, raised(form), form.fraction

    def read(wire: Bytes, length: int, tops: Floats | Bytes, weight: np.float32, out: Floats) -> None:
        wide()
        bucket = known if known else length
        full, top = out.size // bucket, np.float32(form.top)
        for i in range(full):
            a = i * bucket
            prefetch(out, a + _AHEAD, a + bucket + _AHEAD)
            largest = np.float32(_top_of(tops[i], up, fraction) if powers else tops[i])
            _say(wire, a, bucket, unit_of(largest, weight, top), form, flat, anew, out)
        if full < tops.size:
            a = full * bucket
            largest = np.float32(_top_of(tops[full], up, fraction) if powers else tops[full])
            _say(wire, a, out.size - a, unit_of(largest, weight, top), form, flat, anew, out)

    return variant(read, form.mantissa, form.least, int(form.top), known, anew, powers)
