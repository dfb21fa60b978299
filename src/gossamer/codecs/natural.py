"""Natural compression: a sign and a power of two."""

from typing import Literal, final

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.codecs.base import FewBytes, SingleCodec, Unbiased
from gossamer.codecs.scaled import Scaled
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Context
from gossamer.core.parts import part
from gossamer.core.rng import Key
from gossamer.core.wire import expect, pack
from gossamer.kernels.forms import POWERS

_BLOCK = 4096
_LARGEST = 0x7F7FFFFF  # bits of the largest number of float32
_EIGHT = Scaled("natural", POWERS, _BLOCK, "e8m0")


@final
@part("natural")
class Natural(Unbiased, FewBytes, SingleCodec):
    """Natural compression: round each element at random to one of the two nearest powers of two, without bias.

    2^a <= |x| < 2^(a + 1): 2^(a + 1) with probability (|x| - 2^a) / 2^a, else 2^a. Unbiased, with a variance of at most x^2 / 8,
    whatever the gradient's sizes. In 8 bits an exponent is written as its distance to the largest of 4096 elements; what is
    smaller than 2^-126 times that becomes this, or zero, at random as well. `bits=9` is the paper's form: a sign, and the
    exponent as float32 has it; it is read and written by plain torch operations, and slow.

    Use: where elements differ by orders of magnitude: each has a relative error of up to a third, with nothing to tune.

    Not for: training whose steps count: its error on a Gaussian gradient is 8 %, that of `int8` in as many bytes a hundredth of
    a percent. `bits=9` is meant for comparison.

    Wire: d + ceil(d / 4096) bytes; ceil(9 d / 8) with `bits=9`.

    >>> from gossamer.core.rng import CounterRng
    >>> block = Bucket.of({"w": torch.tensor([4.0, -0.5, 0.0, 1.0])})
    >>> wire = Natural().encode(block, {}, Context(0, 1, 0, CounterRng(0, 0, 0)))
    >>> wire.numel(), Natural().decode(wire, block)
    (5, tensor([ 4.0000, -0.5000,  0.0000,  1.0000]))

    Paper: Horvath et al., Natural Compression for Distributed Deep Learning, 2019.
    """

    bits: Literal[8, 9] = 8

    def omega(self, layout: Layout) -> float:
        return 1 / 8

    def wire_bytes(self, layout: Layout) -> int:
        return _EIGHT.wire_bytes(layout) if self.bits == 8 else layout.numel + kernels.quantise_bytes(layout.numel, 1)

    def encode(self, block: Bucket, state: State, context: Context) -> Tensor:
        key = context.rng.key(f"{block.name}/natural")
        return _EIGHT.encode(block, key) if self.bits == 8 else _exponents_and_signs(block.flat.float(), key)

    def read(self, wire: Tensor, layout: Layout, out: Tensor, weight: float | None = None) -> None:
        if self.bits == 8:
            _EIGHT.read(wire, layout, out, weight)
        elif weight is None:
            out.copy_(self._powers(wire, layout))
        else:
            out.add_(self._powers(wire, layout), alpha=weight)

    def scales(self, wire: Tensor, layout: Layout) -> Tensor | None:
        return _EIGHT.scales(wire, layout) if self.bits == 8 else None

    def _powers(self, wire: Tensor, layout: Layout) -> Tensor:
        expect(wire, self.wire_bytes(layout), "natural")
        n = layout.numel
        signs = torch.empty(n, device=wire.device, dtype=torch.float32)
        kernels.quantise_decode(wire[n:].contiguous(), 1, max(n, 1), signs.new_ones(-(-n // max(n, 1))), signs)
        return torch.copysign((wire[:n].int() << 23).view(torch.float32), signs)


def _exponents_and_signs(x: Tensor, key: Key) -> Tensor:
    """Round by adding 23 random bits to each bit pattern: the carry goes into the exponent."""
    magnitudes = x.view(torch.int32) & 0x7FFFFFFF
    random = (kernels.mix3(torch.arange(x.numel(), device=x.device), key) >> 9).int()
    rounded = (magnitudes + random).clamp(max=_LARGEST)  # the largest power stays one, and infinity is none
    exponents = torch.where(magnitudes > _LARGEST, magnitudes, rounded) >> 23
    return pack(exponents.to(torch.uint8), _signs(x))


def _signs(x: Tensor) -> Tensor:
    """The signs, one bit each."""
    n = x.numel()
    norms = x.new_ones(-(-n // max(n, 1)))
    return kernels.quantise_encode(torch.ones_like(x).copysign_(x), 1, max(n, 1), norms, (0, 0))
