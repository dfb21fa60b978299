"""QSGD: a few bits per element, a norm per bucket."""

from typing import Annotated, Literal, final

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.core.block import Block, Layout, State
from gossamer.core.contracts import Codec, Seat
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice, Range
from gossamer.core.wire import expect, take


@final
@part("qsgd")
class QSGD(Codec):
    """QSGD: round each element at random to one of 2^bits - 1 evenly spaced levels of its bucket's norm.

    s = 2^(bits-1) - 1;  level = floor(s x / norm + u), u ~ U[0, 1);  decoded norm * level / s. Unbiased, with variance
    (norm / s)^2 sum f (1 - f), f the fractional part of s |x| / norm. One bit: the two points -norm and +norm.
    An element's place between two levels counts to 2^-23 of one, and the rest is cut off: only so far it is unbiased.

    Use: for 8 times fewer bytes at 4 bits, without a memory. Smaller buckets are less noisy, and longer.

    Not for: fewer than 4 bits without a look at the loss: the noise grows fast, and costs steps.

    Wire: ceil(bits d / 8) + 4 ceil(d / bucket) bytes.

    >>> from gossamer.core.draw import Draw
    >>> block = Block.of({"w": torch.tensor([7.0, -3.0, 0.0, 1.0])})
    >>> codec = QSGD(bits=4)
    >>> wire = codec.encode(block, {}, Seat(0, 1, 0, Draw(0, 0, 0)))
    >>> wire.numel(), codec.decode(wire, block)
    (6, tensor([ 7., -3.,  0.,  1.]))

    Paper: Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, NIPS 2017.
    """

    bits: Annotated[int, Range(2, 8)] = 4
    bucket: Annotated[int, Choice(64, 128, 256, 512, 1024, 2048)] = 512
    norm: Annotated[Literal["max", "l2"], Choice("max", "l2")] = "max"

    def __post_init__(self) -> None:
        require(
            1 <= self.bits <= 8,
            f"qsgd: bits must be between 1 and 8, got {self.bits}; for more use bf16 or fp32",
        )
        require(
            self.bucket >= 1,
            f"qsgd: bucket must be at least 1, got {self.bucket}; the paper uses 512 for 4 bits",
        )

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def bucket_mb(self) -> float:
        return 25.0  # few bytes: what a bucket costs is its latency and its turn on the processor

    @property
    def contracts(self) -> bool:
        return self._omega(self.bucket) < 1

    def omega(self, layout: Layout) -> float:
        return self._omega(min(self.bucket, max(layout.numel, 1)))

    def _omega(self, n: int) -> float:
        """The least upper bounds: some bucket of n elements attains them, or nearly so."""
        s = max(2 ** (self.bits - 1) - 1, 1)
        if self.bits == 1:
            return n - 1.0
        if self.norm == "max":
            return ((1 + (n - 1) / s**2) ** 0.5 - 1) / 2
        return n**0.5 / s - 1 if n >= 4 * s**2 else n / (4 * s**2)

    def wire_bytes(self, layout: Layout) -> int:
        return 4 * self._buckets(layout) + kernels.quantise_bytes(layout.numel, self.bits)

    def encode(self, block: Block, state: State, seat: Seat) -> Tensor:
        flat, key = block.flat.float(), seat.draw.key(f"{block.name}/qsgd")
        wire = block.layout.rooms.of(self.wire_bytes(block.layout), flat.device)
        norms, payload = take(wire, torch.float32, self._buckets(block.layout))
        if self.norm == "max":
            kernels.quantise(flat, self.bits, self.bucket, key, norms, payload)
        else:
            norms.copy_(kernels.bucket_norms(flat, self.bucket, self.norm))
            kernels.quantise_encode(flat, self.bits, self.bucket, norms, key, out=payload)
        return wire

    def overwrite(self, wire: Tensor, layout: Layout, out: Tensor) -> None:
        if out.dtype != torch.float32:
            super().overwrite(wire, layout, out)
            return
        norms, payload = self._open(wire, layout)
        kernels.quantise_decode(payload, self.bits, self.bucket, norms, out)

    def accumulate(self, wire: Tensor, layout: Layout, into: Tensor, weight: float) -> None:
        norms, payload = self._open(wire, layout)
        if into.dtype == torch.float32:
            kernels.quantise_accumulate(payload, self.bits, self.bucket, norms, into, weight)
            return
        narrow = torch.zeros(layout.numel, device=into.device)
        kernels.quantise_accumulate(payload, self.bits, self.bucket, norms, narrow)
        # Weighted in double, or a memory's books would balance to single precision only.
        into.add_(narrow, alpha=weight)

    def scales(self, wire: Tensor, layout: Layout) -> Tensor | None:
        return self._open(wire, layout)[0]

    def _open(self, wire: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        expect(wire, self.wire_bytes(layout), "qsgd")
        return take(wire, torch.float32, self._buckets(layout))

    def _buckets(self, layout: Layout) -> int:
        return -(-layout.numel // self.bucket)
