"""EDEN: a random rotation, the best levels for Gaussian numbers, and a scale that makes the mean of many draws right."""

from typing import Annotated, final

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.codecs.base import SingleCodec, Unbiased
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Context
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice, Range
from gossamer.core.wire import expect, take
from gossamer.kernels.gaussian import levels_of
from gossamer.kernels.layout import ROTATED_LEAST, ROTATED_MOST, Rotated, Rotation, plane_bytes

_KEY = 8  # bytes of the key of the signs, at the head of a wire
_OMEGA = (0.60, 0.14, 0.038, 0.0102, 0.0027, 0.0007)  # of 1 to 6 bits: the mean over rotations, as measured


@final
@part("eden")
class EDEN(Unbiased, SingleCodec):
    """EDEN: rotate each block at random, and round each element to the nearest of 2^bits levels for Gaussian numbers.

    z = H D2 H D1 x with H = the Hadamard matrix over sqrt(B) and D = random signs; q_j = sign(z_j) c, c the Lloyd-Max level
    nearest to |z_j| sqrt(B) / |z|; s = |z|^2 / <z, q>; decoded s D1 H D2 H q, so that <decoded, x> = |x|^2 at every draw.
    E|decoded - x|^2 / |x|^2 is .571, .133, .0358, .0096, .0025, .0006 for 1 to 6 bits, whatever the gradient's distribution. The
    codec states a little more, which is the mean over random signs as measured and no bound: for fixed signs the worst is B - 1.
    Unbiased, but for blocks with a few nonzero elements: of two spikes (1 and .9) in one bit the mean of many draws is off by .00003
    of |x|^2 in blocks of 1024, .0004 in 256, .0085 in 64.

    Use: for 2 bits where `qsgd` needs 3 or 4, and for 1 (`scatter(eden(1), answer=eden(2))`), without a memory: on gradients of a
    language model (`gossamer bench noise --workload lm --at 40`) 2 bits had a squared error of .133 of the gradient's, `qsgd` with 3
    bits .219, with 2 bits 1.62.

    Not for: sparse gradients, where `qsgd(code="rice")` is as exact in fewer bytes, since after a rotation no element is zero. Nor
    links of more than about 500 Mbit/s on CPUs: it takes several times as long as `qsgd`. Nor from 6 bits on: see `int8`.

    Wire: 8 + 4 blocks + ceil(bits d' / 8) + 4 (d - d') bytes, d' = d rounded down to a multiple of 64. A vector is cut into
    blocks of B = `block` as often as they fit, then one of B / 2, B / 4, ... 64 where it fits; what is left travels as it is.

    >>> from gossamer.core.rng import CounterRng
    >>> block = Bucket.of({"w": torch.ones(1024)})
    >>> codec = EDEN(bits=2)
    >>> wire = codec.encode(block, {}, Context(0, 1, 0, CounterRng(0, 0, 0)))
    >>> decoded = codec.decode(wire, block)
    >>> wire.numel(), round(float(decoded.mean()), 4)
    (268, 1.0)

    Paper: Vargaftik et al., EDEN: Communication-Efficient and Robust Distributed Mean Estimation for Federated Learning, ICML 2022;
    its one bit is Vargaftik et al., DRIVE: One-bit Distributed Mean Estimation, NeurIPS 2021.
    """

    bits: Annotated[int, Range(1, 6)] = 4
    block: Annotated[int, Choice(256, 512, 1024, 2048, 4096)] = 1024

    def __post_init__(self) -> None:
        require(1 <= self.bits <= 6, f"eden: bits must be between 1 and 6, got {self.bits}; for more use int8 or bf16")
        require(
            self.block & (self.block - 1) == 0 and ROTATED_LEAST <= self.block <= ROTATED_MOST,
            f"eden: block must be a power of two from {ROTATED_LEAST} to {ROTATED_MOST}, got {self.block}; use 1024",
        )

    def omega(self, layout: Layout) -> float:
        """Measured, and no bound: see the class."""
        return _OMEGA[self.bits - 1]

    def wire_bytes(self, layout: Layout) -> int:
        plan = self._plan(layout)
        head = _KEY if plan.n else 0
        return head + 4 * plan.blocks + 4 * (plan.n - plan.inside) + plane_bytes(plan.inside, self.bits)

    def encode(self, block: Bucket, state: State, context: Context) -> Tensor:
        flat, key = block.flat.float(), context.rng.key(f"{block.name}/eden")
        wire = block.layout.buffers.of(self.wire_bytes(block.layout), flat.device)
        if not block.numel:
            return wire
        words, scales, left, codes = self._open(wire, block.layout)
        for i in range(2):
            words[i : i + 1].fill_((key[i] + 2**31) % 2**32 - 2**31)  # as signed numbers, which torch has
        inside = block.numel - left.numel()
        kernels.eden_encode(flat[:inside], self._form, key, scales, codes)
        left.copy_(flat[inside:])
        return wire

    def read(self, wire: Tensor, layout: Layout, out: Tensor, weight: float | None = None) -> None:
        if not layout.numel:
            expect(wire, 0, "eden")
            return
        words, scales, left, codes = self._open(wire, layout)
        inside = layout.numel - left.numel()
        kernels.eden_decode(codes, self._form, words, scales, out[:inside], weight)
        if weight is None:
            out[inside:].copy_(left)
        else:
            out[inside:].add_(left, alpha=weight)

    def scales(self, wire: Tensor, layout: Layout) -> Tensor | None:
        """Of each block the length of all that can be decoded from it, and what travelled as it is."""
        if not layout.numel:
            return wire.new_zeros(0, dtype=torch.float32)
        _, scales, left, _ = self._open(wire, layout)
        return torch.cat([scales * (levels_of(self.bits)[-1] * self.block**0.5), left.abs()])

    def _open(self, wire: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The key, the scales, the elements in no block, and the codes."""
        expect(wire, self.wire_bytes(layout), "eden")
        plan = self._plan(layout)
        words, rest = take(wire, torch.int32, 2)
        scales, rest = take(rest, torch.float32, plan.blocks)
        left, codes = take(rest, torch.float32, plan.n - plan.inside)
        return words, scales, left, codes

    @property
    def _form(self) -> Rotation:
        return Rotation(self.bits, self.block)

    def _plan(self, layout: Layout) -> Rotated:
        return Rotated(layout.numel, self.block)
