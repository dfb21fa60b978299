"""Gradient dropping: top-k with a warm-up from all elements, or from a quarter of them, to the ratio."""

from collections.abc import Sequence
from functools import lru_cache
from math import ceil, log
from typing import Annotated, Literal, final

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.codecs.casts import FP32
from gossamer.codecs.topk import TopK, add
from gossamer.core.bucket import Bucket, Layout, Segment, State
from gossamer.core.contracts import Biased, Codec, Context
from gossamer.core.errors import WireError
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice, LogRange
from gossamer.core.wire import take

_SPARSE = 0.1 / 1.2  # a warm-up travels dense above this share of elements: a tenth, with a fifth of slack
_PAIR = 8  # bytes of a value and its index


@final
@part("dropping", sample="dropping(warmup=0)")
class Dropping(Biased, Codec):
    """Top-k with a warm-up: with R = 1 - ratio, step t (from 0) drops R_t = R^(warmup / (1 + t)), from `warmup` on R.

    k = ceil((1 - R_t) n) of every tensor, or of a bucket ("block") or the model ("global") as in `topk`, exactly; ties go to the
    lowest index. While 1.2 (1 - R_t) exceeds 0.1 in the warm-up (with 99 percent and 1000 steps, in the first 115), and wherever
    (value, index) pairs are no shorter, the whole bucket is sent dense. Biased: |x - C(x)|^2 <= (1 - k/n) |x|^2. Without warm-up
    it is `topk`.

    With `fall="quarters"` it keeps 1/4 at first, then 1/16, 1/64, ... until that would be less than the ratio, each for an equal
    share of the warm-up: the five densities of Deep Gradient Compression for one in a thousand, the last of which stays.

    Use: for high drop rates, which do harm at the start of training; with `own_gradient()`, `error_feedback()`, or, in
    quarters, `momentum_correction()`.

    Not for: runs of about as many steps as the warm-up, a tenth of which is dense; nor many ranks.

    Wire: 8 k bytes, of values and int32 indices, or 4 n; with a warm-up lengths change, and cost one more small gather.

    >>> codec = Dropping(warmup=1000)
    >>> [round(codec.kept(step), 4) for step in (1, 100, 1000, 5000)]
    [1.0, 0.0956, 0.01, 0.01]

    Paper: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017; the warm-up is that of the
    authors' code for Aji, Heafield, Bogoychev, EMNLP 2019; in quarters, Lin et al., Deep Gradient Compression, ICLR 2018.
    """

    ratio: Annotated[float, LogRange(0.001, 0.1)] = 0.01
    warmup: Annotated[int, Choice(0, 100, 1000)] = 1000
    fall: Annotated[Literal["power", "quarters"], Choice("power", "quarters")] = "power"
    scope: Annotated[Literal["tensor", "block", "global"], Choice("tensor", "block", "global")] = "tensor"

    def __post_init__(self) -> None:
        require(0 < self.ratio <= 1, f"dropping: ratio must lie in (0, 1], got {self.ratio}; 0.01 keeps one percent")
        require(self.warmup >= 0, f"dropping: warmup must be 0 steps or more, got {self.warmup}; the authors take 1000")

    @property
    def sparse(self) -> bool:
        return self.fall == "quarters" and self.ratio < 0.5  # else all elements travel at some step

    @property
    def whole(self) -> bool:
        return self.scope == "global"

    def kept(self, step: int) -> float:
        """The share of elements to send at a step (steps count from 1)."""
        if step >= self.warmup:
            return self.ratio
        if self.fall == "quarters":
            return max(self.ratio, 0.25 ** (1 + self._stages * max(step - 1, 0) // self.warmup))
        return 1 - (1 - self.ratio) ** (self.warmup / max(step, 1))

    @property
    def _stages(self) -> int:
        """Number of densities in a warm-up in quarters, before the ratio."""
        return max(ceil(log(self.ratio, 0.25) - 1e-9) - 1, 1)

    def wire_bytes(self, layout: Layout) -> int | None:
        return None if self.warmup else self._length(layout, 1)

    def wire_limit(self, layout: Layout) -> int:
        return _dense(layout)

    def encode(self, block: Bucket, state: State, context: Context) -> Tensor:
        dense = self._length(block.layout, context.step) == _dense(block.layout)
        codec = FP32() if dense else TopK(self.kept(context.step), self.scope)
        return codec.encode(block, state, context)

    def accumulate(self, wire: Tensor, layout: Layout, into: Tensor, weight: float) -> None:
        if wire.numel() == _dense(layout):
            FP32().accumulate(wire, layout, into, weight)
            return
        add(*self._open(wire, layout), into, weight)

    def mean(self, wires: Sequence[Tensor], layout: Layout, out: Tensor) -> Tensor | None:
        if out.dtype != torch.float32 or any(wire.numel() == _dense(layout) for wire in wires):
            return super().mean(wires, layout, out)
        opened = [self._open(wire, layout) for wire in wires]
        return kernels.sparse_mean([indices for indices, _ in opened], [values for _, values in opened], out)

    def _open(self, wire: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        if wire.dtype != torch.uint8 or wire.numel() not in self._lengths(layout):
            raise WireError(
                f"dropping: {wire.numel()} bytes of {wire.dtype} encode no bucket of {layout.numel} elements at any step. "
                "The peers run different recipes or versions, or the bytes were damaged on the way."
            )
        values, rest = take(wire, torch.float32, wire.numel() // _PAIR)
        return take(rest, torch.int32, wire.numel() // _PAIR)[0], values

    def _length(self, layout: Layout, step: int) -> int:
        kept, dense = self.kept(step), _dense(layout)
        if step < self.warmup and kept > _SPARSE and self.fall == "power":
            return dense
        return min(TopK(kept, self.scope).wire_bytes(layout) or 0, dense)

    def _lengths(self, layout: Layout) -> frozenset[int]:
        """The length of a wire is all that tells how many pairs are in it."""
        return _all_lengths(self, layout.segments, layout.dtype)


@lru_cache(maxsize=1024)
def _all_lengths(codec: Dropping, segments: tuple[Segment, ...], dtype: torch.dtype) -> frozenset[int]:
    layout = Layout(segments, dtype)
    return frozenset(codec._length(layout, step) for step in range(1, max(codec.warmup, 1) + 1))


def _dense(layout: Layout) -> int:
    """The length of a dense message, which no other message has."""
    return FP32().wire_bytes(layout)
