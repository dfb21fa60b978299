"""Random-k: all ranks send the same random elements, so that messages can be summed without indices."""

from math import ceil
from typing import Annotated, final

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.codecs.casts import FP32
from gossamer.codecs.topk import count_of
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Context, LinearCodec, ReduceResult
from gossamer.core.parts import part, require
from gossamer.core.ranges import LogRange
from gossamer.core.rng import Key
from gossamer.core.verbs import Program, all_reduce
from gossamer.kernels.finite import peak


@final
@part("randk")
class RandK(LinearCodec):
    """Send one random element of every run of n / k, new at each step, the same on all ranks; k = ceil(ratio n).

    Every element has the probability of a uniform draw, 1 / (the length of its run). Unscaled elements are biased:
    E|x - C(x)|^2 = (1 - k/n) |x|^2, so error feedback is needed. With `scaled=True` each is multiplied by the length of its run:
    unbiased, with a relative variance of n/k - 1, and no memory.

    Use: among many ranks, and where top-k costs too much time: there is no selection to compute, bytes do not grow with N, and
    an all-reduce sums the messages. With `error_feedback()`.

    Not for: gradients where few elements hold most of the norm: top-k sends those first. Nor `scaled=True` at low ratios: at one
    percent its noise is 99 times the gradient.

    Wire: one all-reduce of 4 (k + 1) bytes (8 for float64): the last number tells whether all others were finite.

    >>> from gossamer.core.rng import CounterRng
    >>> block = Bucket.of({"w": torch.arange(1.0, 9.0)})
    >>> program = RandK(ratio=0.25).average(block, {}, Context(0, 1, 1, CounterRng(0, 1, 0)))
    >>> request = next(program); request.tensor.shape
    torch.Size([3])

    Paper: Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018; Wangni, Wang, Liu, Zhang, Gradient Sparsification
    for Communication-Efficient Distributed Optimization, NeurIPS 2018.
    """

    ratio: Annotated[float, LogRange(0.001, 0.1)] = 0.01
    scaled: bool = False

    def __post_init__(self) -> None:
        require(0 < self.ratio <= 1, f"randk: ratio must lie in (0, 1], got {self.ratio}; 0.01 sends one percent")

    @property
    def unbiased(self) -> bool:
        return self.scaled or self.ratio == 1

    @property
    def exact(self) -> bool:
        return self.ratio == 1

    @property
    def contracts(self) -> bool:
        return not self.scaled or self.ratio > 0.5

    @property
    def sparse(self) -> bool:
        return self.ratio < 1 and not self.scaled

    def omega(self, layout: Layout) -> float:
        if not self.unbiased:
            return float("inf")
        return ceil(layout.numel / count_of(self.ratio, layout.numel)) - 1.0 if layout.numel else 0.0

    def sum_bytes(self, layout: Layout, size: int) -> list[int]:
        count = count_of(self.ratio, layout.numel)
        return [layout.dtype.itemsize * (count + (count < layout.numel))]

    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        n, count = block.numel, count_of(self.ratio, block.numel)
        if count == n:
            return (yield from FP32().average(block, state, context))
        places, runs = _one_of_each_run(count, n, context.rng.shared_key(f"{block.name}/randk"), block.flat.device)
        own = block.flat[places]
        if self.scaled:
            own.mul_(runs)
        spoilt = (peak(block.flat) * 0).to(own.dtype).view(1)  # what is not finite may not have been drawn
        total = yield from all_reduce(torch.cat([own, spoilt]))
        values = total[:-1].div_(context.size).add_(total[-1])
        mean = block.for_mean().zero_().index_add_(0, places, values)

        def add_sent(into: Tensor, weight: float) -> None:
            into.index_add_(0, places, own, alpha=weight)

        return ReduceResult(mean, add_sent, peak(values))


def _one_of_each_run(count: int, n: int, key: Key, device: torch.device) -> tuple[Tensor, Tensor]:
    """As many places in ascending order, each somewhere in a run of its own, and how long the runs are."""
    run = torch.arange(count, device=device)
    low = run * n // count
    length = (run + 1) * n // count - low
    return low + (kernels.mix3(run, key) * length >> 32), length
