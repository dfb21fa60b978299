"""Eight- and four-bit number formats, relative to their bucket's top, and the formats in which a top is written.

A code is a sign, an exponent and a mantissa. Codes of one exponent are `2 ** mantissa` evenly spaced numbers, and the
next ones are twice as far apart; below the least exponent they stay evenly spaced down to zero. Powers of two have no
mantissa. Where all numbers are evenly spaced, they are whole ones, and written as such (two's complement).
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

CENTRE = 64  # 16 bits are random in a fraction of 23, and what is behind them is half of their last one
RUN = 128  # elements of a bucket that are rounded together
INFINITE = 0x7F800000  # bits of infinity: all above, in magnitude, are NaN
_FIELD = 0xFF << 23  # where a float32 has its exponent
_GUARD = 1 + 2.0**-21  # gains are a touch larger, so that |x| == top never rounds below it


class Form(NamedTuple):
    """Which numbers there are: with so many bits of mantissa, evenly spaced below the exponent `least` (as float32 writes
    it, with a bias of 127), and none beyond `top`.
    """

    mantissa: int
    least: int
    top: float

    @property
    def flat(self) -> bool:
        """True if all numbers are evenly spaced."""
        return self.least > 127 + self.top.as_integer_ratio()[0].bit_length() - 1

    @property
    def quantum(self) -> float:
        """The smallest positive number."""
        return 2.0 ** (self.least - 127 - self.mantissa)

    @property
    def fraction(self) -> int:
        """The mantissa of `top`, as float32 writes it."""
        return _bits(self.top) & ~_FIELD


INT8 = Form(7, 134, 127.0)
E4M3 = Form(3, 121, 448.0)
E5M2 = Form(2, 113, 57344.0)
E2M1 = Form(1, 127, 6.0)
E3M0 = Form(0, 125, 16.0)
POWERS = Form(0, 27, 2.0**26)  # 127 powers of two, and zero


class Steps(NamedTuple):
    """In which steps a bucket's top is written: (bits + add) & mask, plus, of its float32; and how it is divided by.

    `lift` over the top is the factor by which an element becomes a small number.
    """

    add: int
    mask: int
    plus: int
    lift: float


def float32_tops(form: Form) -> Steps:
    """Tops as float32: the largest magnitude itself."""
    return Steps(0, -1, 0, form.top * _GUARD)


def bfloat16_tops(form: Form) -> Steps:
    """Tops in 16 bits (bfloat16), rounded up."""
    return Steps(0xFFFF, ~0xFFFF, 0, form.top * _GUARD)


def power_tops(form: Form) -> Steps:
    """Tops in 8 bits: the form's top times the smallest power of two that no element exceeds."""
    return Steps(_FIELD // 255 - 1 - form.fraction, -(1 << 23), form.fraction, form.top)


def ocp_tops(form: Form) -> Steps:
    """In 8 bits, after OCP: 2 ** floor(log2 of the largest magnitude) has the form's largest exponent, and what exceeds
    its top is cut off.
    """
    return Steps(0, -(1 << 23), form.fraction, form.top)


def run_of(bucket: int) -> tuple[int, int]:
    """A bucket is rounded in runs of so many elements; and half of that, rounded up: from there on an element of a run has the
    other half of the random word of the one that is so far before it.
    """
    run = min(bucket, RUN)
    return run, (run + 1) // 2


@lru_cache(maxsize=64)
def meanings(form: Form, device: torch.device) -> Tensor:
    """The number of each of 256 codes, not yet scaled by its bucket's top; cached, since the copy to a device blocks."""
    if form.flat:
        return torch.arange(256, device="cpu").to(torch.int8).float().to(device)
    code = torch.arange(128, device="cpu")
    exponent, steps = code >> form.mantissa, code & ((1 << form.mantissa) - 1)
    steps = steps + (exponent > 0) * (1 << form.mantissa)
    said = (steps.double() * 2.0 ** (exponent.clamp(min=1) - 1)).float() * form.quantum
    return torch.cat([said, -said]).to(device)


def squeezed(tops: Tensor, form: Form) -> Tensor:
    """Write tops that are the form's top times a power of two as one byte: the power plus 127; 255 if not finite."""
    field = tops.view(torch.int32) >> 23
    return torch.where(field == 255, 255, (field - raised(form)).clamp(min=0)).to(torch.uint8)


def stretched(powers: Tensor, form: Form) -> Tensor:
    """The inverse of `squeezed`."""
    return _tops(form, powers.device)[powers.int()]


@lru_cache(maxsize=64)
def _tops(form: Form, device: torch.device) -> Tensor:
    """The top of each of 256 bytes; cached, since the copy to a device blocks."""
    field = (torch.arange(256, dtype=torch.int32, device="cpu") + raised(form)).clamp(max=255)
    field[255] = 255
    bits = torch.where(field == 255, INFINITE, (field << 23) + form.fraction)
    return bits.int().view(torch.float32).to(device)


def raised(form: Form) -> int:
    """Exponent of the form's top, relative to that of 1."""
    return (_bits(form.top) >> 23) - 127


def _bits(number: float) -> int:
    return int(torch.tensor(number, dtype=torch.float32, device="cpu").view(torch.int32))
