"""Top-k: send only the elements of largest magnitude."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import ceil
from typing import Annotated, Literal, final

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.codecs.base import FewBytes
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Biased, Codec, Context
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice, LogRange
from gossamer.core.wire import expect, pack, take


@final
@part("topk")
class TopK(Biased, FewBytes, Codec):
    """Send the k elements of largest magnitude of a tensor, a bucket or the model; the memory keeps the rest.

    k = ceil(ratio n). Ties go to the lowest index. Biased: |x - C(x)|^2 <= (1 - k/n) |x|^2, so error feedback is needed.
    n is the number of elements of a tensor, of a bucket ("block": the part sent as one message, so it depends on the number of
    chunks too), or of the model ("global": one bucket). Gradients of a Transformer's tensors differ much in size, and a percent
    of each tensor spends most elements on small gradients.

    Use: where few elements hold most of the gradient, as in embeddings; with `error_feedback()`.

    Not for: gathers among many ranks, unless the ratio shrinks with their number. `index="rice"` shortens messages, costs one
    more message, and is for CPUs: on a GPU the host does not know the length of a message in advance. `index="elias_fano"` is known
    in advance, and nearly as short where elements are as if drawn at random.

    Wire: 4 k bytes of float32 values, and 4 k of int32 indices; or these in Elias and Fano's code (`index="elias_fano"`, some
    2 + log2(n / k) bits an index, 8.6 for one percent); or their gaps in a block-adaptive Rice code (`index="rice"`, typically 3 to 12
    bits an index; lengths then depend on the data and cost one small gather more).

    >>> from gossamer.core.rng import CounterRng
    >>> block = Bucket.of({"w": torch.tensor([0.1, -3.0, 0.2, 2.0])})
    >>> codec = TopK(ratio=0.5)
    >>> wire = codec.encode(block, {}, Context(0, 1, 0, CounterRng(0, 0, 0)))
    >>> wire.numel(), codec.decode(wire, block)
    (16, tensor([ 0., -3.,  0.,  2.]))

    Paper: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017; Stich et al., Sparsified SGD
    with Memory, NeurIPS 2018.
    """

    ratio: Annotated[float, LogRange(0.001, 0.1)] = 0.01
    scope: Annotated[Literal["tensor", "block", "global"], Choice("tensor", "block", "global")] = "tensor"
    index: Literal["int32", "elias_fano", "rice"] = "int32"

    def __post_init__(self) -> None:
        require(0 < self.ratio <= 1, f"topk: ratio must lie in (0, 1], got {self.ratio}; 0.01 sends one percent")

    @property
    def sparse(self) -> bool:
        return self.ratio < 1

    @property
    def whole(self) -> bool:
        return self.scope == "global"

    def wire_bytes(self, layout: Layout) -> int | None:
        if self.index == "int32":
            return 8 * self._count(layout)
        return None if self.index == "rice" else self.wire_limit(layout)

    def wire_limit(self, layout: Layout) -> int:
        count = self._count(layout)
        if self.index == "elias_fano":
            return 4 * count + kernels.place_bytes(count, layout.numel)
        return 8 * count + 1  # the Rice code falls back to int32 behind one byte of mode

    def encode(self, block: Bucket, state: State, context: Context) -> Tensor:
        flat, layout = block.flat.float(), block.layout
        if self.index != "int32":
            indices = torch.empty(self._count(layout), dtype=torch.int32, device=flat.device)
            self._select(flat, layout, indices)
            return pack(flat.index_select(0, indices), self._write(indices, block.numel))
        wire = layout.buffers.of(self.wire_limit(layout) - 1, flat.device)
        values, indices = wire.view(torch.float32).view(2, -1)
        self._select(flat, layout, indices.view(torch.int32))
        torch.index_select(flat, 0, indices.view(torch.int32), out=values)
        return wire

    def _write(self, indices: Tensor, n: int) -> Tensor:
        if self.index == "rice":
            return kernels.index_encode(indices, n)
        return kernels.places_encode(indices.long().view(1, -1), n)

    def accumulate(self, wire: Tensor, layout: Layout, into: Tensor, weight: float) -> None:
        add(*self._open(wire, layout), into, weight)

    def mean(self, wires: Sequence[Tensor], layout: Layout, out: Tensor) -> Tensor | None:
        if out.dtype != torch.float32:
            return super().mean(wires, layout, out)
        opened = [self._open(wire, layout) for wire in wires]
        return kernels.sparse_mean([indices for indices, _ in opened], [values for _, values in opened], out)

    def _open(self, wire: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        count = self._count(layout)
        values, rest = take(wire, torch.float32, count)
        if self.index == "rice":
            return kernels.index_decode(rest, count, layout.numel), values
        if self.index == "elias_fano":
            return kernels.places_decode(rest, 1, count, layout.numel).view(-1).int(), values
        expect(rest, 4 * count, "topk indices")
        return take(rest, torch.int32, count)[0], values

    def _counts(self, layout: Layout) -> tuple[int, ...]:
        return _shares(self.ratio, layout.bounds if self.scope == "tensor" else (0, layout.numel))

    def _count(self, layout: Layout) -> int:
        return sum(self._counts(layout))

    def _select(self, flat: Tensor, layout: Layout, out: Tensor) -> None:
        if self.scope != "tensor" or len(layout.segments) == 1:
            out.copy_(kernels.topk(flat, self._count(layout)))
        else:
            kernels.topk_each(flat, layout.bounds, self._counts(layout), out)


def add(indices: Tensor, values: Tensor, into: Tensor, weight: float) -> None:
    """Add values, times a weight, at their indices."""
    if into.dtype == torch.float32:
        kernels.scatter_add(into, indices, values, weight)
        return
    indices, values = kernels.within(indices, values, into.numel())
    into.index_add_(0, indices.long(), values.to(into.dtype), alpha=weight)


def count_of(ratio: float, n: int) -> int:
    """The number of elements that are this share of n."""
    return ceil(ratio * n * (1 - 1e-12))  # 0.07 * 100 is a little more than 7


@lru_cache(maxsize=1024)
def _shares(ratio: float, bounds: tuple[int, ...]) -> tuple[int, ...]:
    """Number of elements to send of each segment; cached, since each step needs it several times."""
    return tuple(count_of(ratio, b - a) for a, b in pairwise(bounds))
