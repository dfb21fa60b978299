"""Eight-bit numbers: one byte per element, relative to the largest of its bucket."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.core.rng import Key
from gossamer.kernels.forms import CENTRE, INFINITE, Form, Steps, meanings, run_of, squeezed, stretched
from gossamer.kernels.layout import TINY, divisor, units
from gossamer.kernels.reference.hashing import mix3
from gossamer.kernels.reference.planes import put


def encode(x: Tensor, form: Form, steps: Steps, bucket: int, key: Key | None, tops: Tensor, wire: Tensor) -> None:
    n = x.numel()
    magnitudes = pad(x.view(torch.int32) & 0x7FFFFFFF, (0, -n % bucket)).view(-1, bucket)
    said = (((magnitudes.amax(1).clamp(max=INFINITE) + steps.add) & steps.mask) + steps.plus).view(torch.float32)
    tops.copy_(squeezed(said, form) if tops.dtype == torch.uint8 else said)
    gains = (divisor(steps.lift, x.device) / said).masked_fill_(said < TINY, 0.0)
    y = x * gains.repeat_interleave(bucket)[:n]
    y = torch.where(y < form.top, y, form.top)  # NaN ends at the top
    y = torch.where(y > -form.top, y, -form.top)
    random = None if key is None else _fractions(n, bucket, key, x.device)
    wire.copy_((_whole(y, random) if form.flat else _floating(y, x, form, random)).to(torch.uint8))


def _whole(y: Tensor, random: Tensor | None) -> Tensor:
    return (y.round().int() if random is None else ((y * (1 << 23)).int() + random) >> 23) & 255


def _floating(y: Tensor, x: Tensor, form: Form, random: Tensor | None) -> Tensor:
    m, y = form.mantissa, y.abs()
    if random is None:
        exponent = (y.view(torch.int32) >> 23).clamp(min=form.least)
        steps = (y * ((254 + m - exponent) << 23).view(torch.float32)).round().int()  # in the spacing at its exponent
        code = ((exponent - form.least) << m) + steps
    else:
        # What lies below the least exponent is moved up by its power, and is as evenly spaced there.
        power = 2.0 ** (form.least - 127)
        raised = torch.where(y < power, y + power, y)
        below = torch.where(y < power, form.least << m, (form.least - 1) << m)
        code = ((raised.view(torch.int32) + (random >> m)) >> (23 - m)) - below
    return code.int() | ((x.view(torch.int32) >> 24) & 128)


def _fractions(n: int, bucket: int, key: Key, device: torch.device) -> Tensor:
    """23 bits for each element, of which the first 16 are random; two elements share one random word."""
    place = torch.arange(n, dtype=torch.int64, device=device)
    run, half = run_of(bucket)
    second = place % bucket % run >= half
    words = mix3(place - second * half, key)
    return (torch.where(second, words << 7, words >> 9) & 0x7FFF80 | CENTRE).int()


def read(wire: Tensor, form: Form, bucket: int, tops: Tensor, weight: float, out: Tensor, anew: bool) -> None:
    largest = stretched(tops, form) if tops.dtype == torch.uint8 else tops
    unit = units(largest, weight, int(form.top)).repeat_interleave(bucket)[: out.numel()]
    said = meanings(form, out.device)[wire.long()] * unit
    put(said, out, anew)
