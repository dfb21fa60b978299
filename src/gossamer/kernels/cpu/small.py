"""A byte for each element: a bucket is measured, and rounded while it is still near.

Kernels are compiled for one form and one length of buckets: loops of a length that the compiler knows take half the time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from torch import Tensor

from gossamer.kernels.cpu.compile import Bytes, Floats, Ints, kernel
from gossamer.kernels.cpu.hashing import start, word
from gossamer.kernels.cpu.hints import bits_of, float_of, prefetch, wide
from gossamer.kernels.cpu.rounding import unit_of
from gossamer.kernels.forms import CENTRE, INFINITE, Form, Steps, run_of
from gossamer.kernels.layout import TINY

Code = Callable[[np.float32, np.float32, np.int32], np.int32]
Meaning = Callable[[np.int32], np.float32]
Encode = Callable[
    [Floats, Ints, np.int32, np.int32, np.int32, np.float32, np.uint32, np.uint32, Floats, Ints, Bytes], None
]
Read = Callable[[Bytes, Floats, np.float32, Floats], None]

_AHEAD = 4096  # elements that are asked for before they are needed
_TO_WHOLE = 3 * 2.0**22  # added to a number, leaves no bits behind the point


def encode(
    x: Tensor, form: Form, steps: Steps, bucket: int, key: tuple[int, int] | None, tops: Tensor, wire: Tensor
) -> None:
    values, said, (counter, k1) = x.detach().numpy(), tops.numpy(), start(key or (0, 0), 0)
    add, mask, plus, lift = np.int32(steps.add), np.int32(steps.mask), np.int32(steps.plus), np.float32(steps.lift)
    bits, bits_said = values.view(np.int32), said.view(np.int32)
    write = _encoder(form, key is not None, bucket)
    write(values, bits, add, mask, plus, lift, counter, k1, said, bits_said, wire.numpy())


def read(wire: Tensor, form: Form, bucket: int, tops: Tensor, weight: float, out: Tensor, anew: bool) -> None:
    _reader(form, bucket, anew)(wire.numpy(), tops.numpy(), np.float32(weight), out.detach().numpy())


def _coder(form: Form, dice: bool) -> Code:
    """The code of x, given what to multiply it by, and 23 random bits."""
    m, least, highest = form.mantissa, form.least, form.top

    @kernel
    def whole(x: np.float32, gain: np.float32, random: np.int32) -> np.int32:
        y, top = np.float32(x * gain), np.float32(highest)
        y = y if y < top else top
        y = y if y > -top else -top
        if dice:
            return np.int32(np.int32(np.int32(np.float32(y * np.float32(1 << 23))) + random) >> np.int32(23))
        return bits_of(np.float32(y + np.float32(_TO_WHOLE)))  # of which the lowest byte counts

    @kernel
    def floating(x: np.float32, gain: np.float32, random: np.int32) -> np.int32:
        y, top = np.float32(np.abs(x) * gain), np.float32(highest)
        y = y if y < top else top
        if dice:
            # What lies below the least exponent is moved up by its power, and is as evenly spaced there.
            low = y < np.float32(2.0 ** (least - 127))
            raised = np.float32(y + np.float32(2.0 ** (least - 127))) if low else y
            below = np.int32(least << m) if low else np.int32((least - 1) << m)
            code = np.int32(np.int32(bits_of(raised) + np.int32(random >> np.int32(m))) >> np.int32(23 - m)) - below
        else:
            exponent = max(np.int32(bits_of(y) >> np.int32(23)), np.int32(least))
            ruler = np.int32(np.int32(exponent + np.int32(23 - m)) << np.int32(23))  # whose last digit is the spacing
            steps = np.int32(bits_of(np.float32(y + float_of(ruler))) - ruler)
            code = np.int32(np.int32(np.int32(exponent - np.int32(least)) << np.int32(m)) + steps)
        return np.int32(np.int32(code) | np.int32(np.int32(bits_of(x) >> np.int32(24)) & np.int32(128)))

    return whole if form.flat else floating


@lru_cache(maxsize=64)
def _encoder(form: Form, dice: bool, bucket: int) -> Encode:
    code, (run, half) = _coder(form, dice), run_of(bucket)
    second = run - half

    @kernel
    def pairs(x: Floats, a: int, length: int, gain: np.float32, counter: np.uint32, k1: np.uint32, out: Bytes) -> None:
        """Two elements have one random word, of which each has a half."""
        wide()
        for j in range(length):
            i, k = np.uint64(a + j), np.uint64(a + half + j)
            random = word(np.uint32(counter + np.uint32(i)), k1) if dice else np.uint32(0)
            out[i] = np.uint8(code(x[i], gain, _fraction(np.uint32(random >> np.uint32(9)))))
            out[k] = np.uint8(code(x[k], gain, _fraction(np.uint32(random << np.uint32(7)))))

    @kernel
    def alone(x: Floats, a: int, b: int, gain: np.float32, counter: np.uint32, k1: np.uint32, out: Bytes) -> None:
        for j in range(b - a):
            i = np.uint64(a + j)
            random = word(np.uint32(counter + np.uint32(i)), k1) if dice else np.uint32(0)
            out[i] = np.uint8(code(x[i], gain, _fraction(np.uint32(random >> np.uint32(9)))))

    @kernel
    def rest(x: Floats, a: int, b: int, gain: np.float32, counter: np.uint32, k1: np.uint32, out: Bytes) -> None:
        """Of a run that is not whole."""
        both = max(b - a - half, 0)
        pairs(x, a, both, gain, counter, k1, out)
        alone(x, a + both, min(a + half, b), gain, counter, k1, out)

    @kernel
    def write(
        x: Floats,
        bits: Ints,
        add: np.int32,
        mask: np.int32,
        plus: np.int32,
        lift: np.float32,
        counter: np.uint32,
        k1: np.uint32,
        tops: Floats,
        top_of: Ints,
        out: Bytes,
    ) -> None:
        wide()
        for i in range(tops.size):
            a, b = i * bucket, min(i * bucket + bucket, x.size)
            full = b - a
            top_of[i] = np.int32(
                np.int32(
                    np.int32((_largest(bits, a, bucket) if full == bucket else _largest(bits, a, full)) + add) & mask
                )
                + plus
            )
            gain = np.float32(0) if tops[i] < np.float32(TINY) else np.float32(lift / tops[i])
            for r in range(full // run):
                lo = a + r * run
                prefetch(x, lo + _AHEAD, lo + run + _AHEAD)
                pairs(x, lo, second, gain, counter, k1, out)
                if half > second:
                    alone(x, lo + second, lo + half, gain, counter, k1, out)
            if full % run:
                rest(x, b - full % run, b, gain, counter, k1, out)

    return write


@kernel
def _largest(bits: Ints, a: int, length: int) -> np.int32:
    """Of the magnitudes of a bucket, or infinity."""
    wide()
    top = np.int32(0)
    for j in range(length):
        magnitude = np.int32(bits[np.uint64(a + j)] & np.int32(0x7FFFFFFF))
        top = magnitude if magnitude > top else top
    return min(top, np.int32(INFINITE))


@kernel
def _fraction(random: np.uint32) -> np.int32:
    return np.int32(np.uint32(random & np.uint32(0x7FFF80)) | np.uint32(CENTRE))


def _meaning(form: Form) -> Meaning:
    """What a code says, before its bucket's top is known."""
    m, least = form.mantissa, form.least

    @kernel
    def whole(code: np.int32) -> np.float32:
        return np.float32(code)

    @kernel
    def floating(code: np.int32) -> np.float32:
        size = np.int32(np.int32(code & np.int32(127)) << np.int32(23 - m))
        low = size < np.int32(1 << 23)  # below the least exponent: as many steps, less the power that comes with it
        raised = float_of(np.int32(size + (np.int32(least << 23) if low else np.int32((least - 1) << 23))))
        said = np.float32(raised - (np.float32(2.0 ** (least - 127)) if low else np.float32(0)))
        return float_of(np.int32(bits_of(said) | np.int32(code & np.int32(-(1 << 31)))))

    return whole if form.flat else floating


@lru_cache(maxsize=64)
def _reader(form: Form, bucket: int, anew: bool) -> Read:
    """Writes what codes say over the elements, or adds it to them. To 0.0 it is added as well, so that there is no -0.0."""
    meaning, highest = _meaning(form), form.top

    @kernel
    def say(wire: Bytes, a: int, length: int, unit: np.float32, out: Floats) -> None:
        wide()
        for j in range(length):
            i = np.uint64(a + j)
            said = np.float32(unit * meaning(np.int32(np.int8(wire[i]))))
            out[i] = np.float32(0) + said if anew else out[i] + said

    @kernel
    def read(wire: Bytes, tops: Floats, weight: np.float32, out: Floats) -> None:
        wide()
        full = out.size // bucket
        for i in range(full):
            a = i * bucket
            prefetch(out, a + _AHEAD, a + bucket + _AHEAD)
            say(wire, a, bucket, unit_of(tops[i], weight, np.float32(highest)), out)
        if full < tops.size:
            a = full * bucket
            say(wire, a, out.size - a, unit_of(tops[full], weight, np.float32(highest)), out)

    return read
