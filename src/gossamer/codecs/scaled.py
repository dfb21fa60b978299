"""Shared code of the 8-bit and 4-bit codecs: one byte or half a byte per element, one scale per block of elements."""

from abc import abstractmethod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.codecs.base import FewBytes, SingleCodec
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Context
from gossamer.core.parts import require
from gossamer.core.rng import Key
from gossamer.core.wire import expect, take
from gossamer.kernels.forms import Form, bfloat16_tops, float32_tops, ocp_tops, power_tops, stretched
from gossamer.kernels.small import LONGEST

Scale = Literal["fp32", "bf16", "e8m0", "ocp"]
Rounding = Literal["stochastic", "nearest"]

_STEPS = {"fp32": float32_tops, "bf16": bfloat16_tops, "e8m0": power_tops, "ocp": ocp_tops}
_WIDTHS = {"fp32": torch.float32, "bf16": torch.bfloat16, "e8m0": torch.uint8, "ocp": torch.uint8}
_ROUNDED_UP = {"fp32": 1.0, "bf16": 1 + 2.0**-7, "e8m0": 2.0, "ocp": 1.0}  # at most so many times the largest magnitude


class Scaled(NamedTuple):
    """Wire format of an 8-bit or 4-bit codec: the scales of all blocks, then the codes.

    A scale is the value of the format's largest number: as a float, or as a power of two. Of 4-bit codes one byte has one of the
    first half of all elements (its lower bits) and one of the second half.
    """

    name: str
    form: Form
    block: int
    scale: Scale
    rounding: Rounding = "stochastic"
    bits: int = 8

    def check(self) -> None:
        """Refuse what the format cannot be."""
        require(
            1 <= self.block <= LONGEST,
            f"{self.name}: block must be between 1 and {LONGEST}, got {self.block}; 128 elements with one scale are usual",
        )
        require(
            self.scale != "ocp" or self.rounding == "nearest",
            f"{self.name}: scale='ocp' clips the largest element of a block, so that stochastic rounding is biased too; "
            "use scale='e8m0', a power of two that is rounded up, or rounding='nearest' with error_feedback()",
        )

    def omega(self, layout: Layout) -> float:
        """Bound of the relative variance: a step of the mantissa for floats, and half a smallest number per element."""
        n, h = min(self.block, max(layout.numel, 1)), 2.0**-self.form.mantissa
        finest = _ROUNDED_UP[self.scale] * self.form.quantum / self.form.top
        return (0.0 if self.form.flat else h**2 / (4 * (1 + h))) + n * finest**2 / 4

    def wire_bytes(self, layout: Layout) -> int:
        return self._blocks(layout) * _WIDTHS[self.scale].itemsize + -(-layout.numel * self.bits // 8)

    def encode(self, block: Bucket, key: Key | None) -> Tensor:
        layout, device = block.layout, block.flat.device
        wire = layout.buffers.of(self.wire_bytes(layout), device)
        scales, written = take(wire, _WIDTHS[self.scale], self._blocks(layout))
        codes = written if self.bits == 8 else layout.buffers.of(layout.numel, device)
        in_halves = self.scale == "bf16"
        tops = layout.buffers.of(4 * self._blocks(layout), device).view(torch.float32) if in_halves else scales
        steps = _STEPS[self.scale](self.form)
        kernels.small_encode(block.flat.float(), self.form, steps, self.block, key, tops, codes)
        if in_halves:
            scales.copy_(tops)
        if self.bits == 4:
            _halve(codes, written)
        return wire

    def read(self, wire: Tensor, layout: Layout, out: Tensor, weight: float | None = None) -> None:
        tops, codes = self._take(wire, layout)
        kernels.small_decode(codes, self.form, self.block, tops, out, weight)

    def scales(self, wire: Tensor, layout: Layout) -> Tensor:
        """The largest magnitude of each block."""
        tops, _ = self._take(wire, layout)
        return stretched(tops, self.form) if tops.dtype == torch.uint8 else tops

    def _take(self, wire: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Scales (bfloat16 ones as float32) and codes."""
        expect(wire, self.wire_bytes(layout), self.name)
        scales, written = take(wire, _WIDTHS[self.scale], self._blocks(layout))
        codes = written if self.bits == 8 else _whole(written)[: layout.numel]
        return scales.float() if scales.dtype == torch.bfloat16 else scales, codes

    def _blocks(self, layout: Layout) -> int:
        return -(-layout.numel // self.block)


def _halve(codes: Tensor, out: Tensor) -> None:
    """Write codes of a sign and three bits as half bytes: the second half of them into the upper bits."""
    short = codes & 7 | codes >> 4 & 8
    out.copy_(short[: out.numel()])
    out[: codes.numel() - out.numel()] |= short[out.numel() :] << 4


def _whole(halves: Tensor) -> Tensor:
    """The inverse of `_halve`; the last code is padding where their number is odd."""
    short = torch.cat([halves & 15, halves >> 4])
    return short & 7 | (short & 8) << 4


class ScaledCodec(FewBytes, SingleCodec):
    """A codec with the `Scaled` wire format; subclasses say which."""

    @property
    @abstractmethod
    def writes(self) -> Scaled: ...

    @property
    def unbiased(self) -> bool:
        return self.writes.rounding == "stochastic"

    def omega(self, layout: Layout) -> float:
        return self.writes.omega(layout) if self.unbiased else float("inf")

    def wire_bytes(self, layout: Layout) -> int:
        return self.writes.wire_bytes(layout)

    def encode(self, block: Bucket, state: State, context: Context) -> Tensor:
        return self.writes.encode(block, context.rng.key(f"{block.name}/{self.name}") if self.unbiased else None)

    def read(self, wire: Tensor, layout: Layout, out: Tensor, weight: float | None = None) -> None:
        self.writes.read(wire, layout, out, weight)

    def scales(self, wire: Tensor, layout: Layout) -> Tensor | None:
        return self.writes.scales(wire, layout)
