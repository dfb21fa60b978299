"""Plain floats: float32 (or float64), bfloat16 and float16."""

from typing import ClassVar, final

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.codecs.base import Unbiased
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Codec, Context, LinearCodec, ReduceResult
from gossamer.core.parts import part
from gossamer.core.verbs import Program, all_reduce
from gossamer.core.wire import expect, pack


def _read(name: str, wire: Tensor, dtype: torch.dtype, layout: Layout) -> Tensor:
    expect(wire, layout.numel * dtype.itemsize, name)
    aligned = wire if wire.storage_offset() % dtype.itemsize == 0 else wire.clone()
    return aligned.view(dtype)


@final
@part("fp32")
class FP32(Unbiased, Codec, LinearCodec):
    """Full precision: float32, or float64 for a double-precision model.

    Use: on fast links, as the baseline, and in a rule for small or sensitive parameters.

    Not for: slow links: it saves nothing.

    Wire: 4 d bytes (8 d for float64).

    >>> from gossamer.core.rng import CounterRng
    >>> block = Bucket.of({"w": torch.tensor([1.5, -2.0])})
    >>> FP32().encode(block, {}, Context(0, 1, 0, CounterRng(0, 0, 0))).numel()
    8
    """

    @property
    def exact(self) -> bool:
        return True

    @property
    def bucket_mb(self) -> float:
        return 25.0  # one all-reduce, which cuts its tensor into pieces itself

    def omega(self, layout: Layout) -> float:
        return 0.0

    def wire_bytes(self, layout: Layout) -> int:
        return layout.numel * layout.dtype.itemsize

    def sum_bytes(self, layout: Layout, size: int) -> list[int]:
        return [self.wire_bytes(layout)]

    def encode(self, block: Bucket, state: State, context: Context) -> Tensor:
        # A copy: the mean may be written over the bucket while the message is still in flight.
        return pack(block.new().copy_(block.flat))

    def accumulate(self, wire: Tensor, layout: Layout, into: Tensor, weight: float) -> None:
        into.add_(_read("fp32", wire, layout.dtype, layout), alpha=weight)

    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        def add_sent(into: Tensor, weight: float) -> None:
            into.add_(block.flat, alpha=weight)

        mine = block.flat if block.into is block.flat else block.for_mean().copy_(block.flat)
        total = yield from all_reduce(mine)
        return ReduceResult(total, add_sent, kernels.divide(total, context.size))


class _Half(Codec, LinearCodec):
    """Shared code of bf16 and fp16: rounding to the nearest 16-bit number."""

    dtype: ClassVar[torch.dtype]

    @property
    def unbiased(self) -> bool:
        return False

    @property
    def needs_feedback(self) -> bool:
        return False  # the rounding error is a fixed fraction of each element, far below a gradient's own noise

    def omega(self, layout: Layout) -> float:
        return float("inf")  # small as it is, it does not average out

    def wire_bytes(self, layout: Layout) -> int:
        return 2 * layout.numel

    def encode(self, block: Bucket, state: State, context: Context) -> Tensor:
        return self._new(block).copy_(block.flat).view(torch.uint8)

    def _new(self, block: Bucket) -> Tensor:
        """Buffer for the bucket's numbers in 16 bits."""
        return block.layout.buffers.of(2 * block.numel, block.flat.device).view(self.dtype)

    def accumulate(self, wire: Tensor, layout: Layout, into: Tensor, weight: float) -> None:
        into.add_(_read(self.name, wire, self.dtype, layout), alpha=weight)

    def overwrite(self, wire: Tensor, layout: Layout, out: Tensor) -> None:
        out.copy_(_read(self.name, wire, self.dtype, layout))

    @property
    def sum_rounding(self) -> float:
        return torch.finfo(self.dtype).eps / 2

    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        mine = torch.div(block.flat, context.size, out=self._new(block))  # first: a sum of N could overflow fp16
        total = yield from all_reduce(mine)
        mean = block.for_mean()

        def add_sent(into: Tensor, weight: float) -> None:
            share = torch.div(block.flat, context.size, out=self._new(block))
            into.add_(share, alpha=weight * context.size)

        return ReduceResult(mean.copy_(total), add_sent)


@final
@part("bf16")
class BF16(_Half):
    """bfloat16: the range of float32 with 8 bits of precision.

    Use: to halve the bytes with nothing to tune, and the range of float32.

    Not for: sums over many ranks under `allreduce`, where each addition rounds to 8 bits: prefer `scatter`.

    Wire: 2 d bytes. Relative error at most 2^-9 per element. Under `scatter` sums are made in float32; under `allreduce`
    the backend sums in bf16.

    >>> from gossamer.core.rng import CounterRng
    >>> block = Bucket.of({"w": torch.tensor([1.0, 1.001])})
    >>> codec = BF16()
    >>> codec.decode(codec.encode(block, {}, Context(0, 1, 0, CounterRng(0, 0, 0))), block)
    tensor([1., 1.])
    """

    dtype: ClassVar[torch.dtype] = torch.bfloat16


@final
@part("fp16")
class FP16(_Half):
    """float16: 11 bits of precision, up to 65504; larger gradients become inf, and the step is skipped.

    Use: to halve the bytes where 8 bits of precision are too few.

    Not for: gradients beyond 65504, to which a large loss scale is enough.

    Wire: 2 d bytes. Relative error at most 2^-12 per element that is not tiny.

    >>> from gossamer.core.rng import CounterRng
    >>> block = Bucket.of({"w": torch.tensor([1.0, 1e6])})
    >>> codec = FP16()
    >>> codec.decode(codec.encode(block, {}, Context(0, 1, 0, CounterRng(0, 0, 0))), block)
    tensor([1., inf])
    """

    dtype: ClassVar[torch.dtype] = torch.float16

    @property
    def any_size(self) -> bool:
        return False
