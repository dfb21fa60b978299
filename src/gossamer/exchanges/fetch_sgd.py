"""FetchSGD: momentum and error feedback in the sketch, the same on all ranks, so that no rank keeps a state of its own."""

from math import ceil
from typing import Literal, final
from zlib import crc32

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.codecs.count_sketch import refuse_long_table, require_table
from gossamer.codecs.topk import count_of
from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.constraints import those
from gossamer.core.contracts import Context, Exchange, Policy, ReduceResult, Unit
from gossamer.core.parts import part, require
from gossamer.core.rng import CounterRng
from gossamer.core.verbs import Program, all_reduce
from gossamer.kernels.finite import peak


@final
@part("fetch_sgd")
class FetchSGD(Exchange):
    """Ranks send count sketches only; momentum and residual are sketches too, the same on all ranks.

    S = mean_i sketch(g_i);  U = m U + S;  E = E + U;  the mean is D, the k largest estimates in E, k = ceil(ratio n);
    the cells of E and U that sketch(D) touches become zero.  `error="subtract"` subtracts sketch(D) from E instead, as the
    paper writes; noise that was extracted then comes back with the other sign, and training diverges sooner.
    Values are estimates, never exact: with k too large for the table it extracts noise. Hashes stay the same for a whole run,
    and tables belong to one set of buckets: a checkpoint that is loaded with other buckets starts with empty tables.

    With momentum, weight decay that the optimizer adds to gradients enters each rank's gradient before it is sketched, as in the
    authors' code: added to the mean it would count (1 - m) times.

    Use: where ranks can keep no state from one step to the next, and few elements hold most of the gradient.

    Not for: ranks that can keep a state: allreduce(count_sketch()) fetches exact values for a few more bytes, and trains
    better. Nor optimizers with momentum, since the exchange has its own: attach refuses those.

    Wire: one all-reduce of 4 rows columns bytes. Memory: two tables.

    >>> FetchSGD(columns=10_000)
    fetch_sgd(columns=10000)

    Paper: Rothchild et al., FetchSGD: Communication-Efficient Federated Learning with Sketching, ICML 2020.
    """

    ratio: float = 0.002
    rows: int = 5
    columns: int | None = None
    momentum: float = 0.9
    error: Literal["zero", "subtract"] = "zero"

    def __post_init__(self) -> None:
        require(0 < self.ratio <= 1, f"fetch_sgd: ratio must lie in (0, 1], got {self.ratio}; 0.002 takes one in 500")
        require_table(self.name, self.rows, self.columns, "five cells of each row an element")
        require(0 <= self.momentum < 1, f"fetch_sgd: momentum must lie in [0, 1), got {self.momentum}; 0.9 is usual")

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(adds_momentum=self.momentum > 0)

    @property
    def unbiased(self) -> bool:
        return False

    @property
    def needs_feedback(self) -> bool:
        return False  # it has its own

    @property
    def owes(self) -> bool:
        return True

    @property
    def contracts(self) -> bool:
        return False

    @property
    def bucket_mb(self) -> float:
        return 100.0

    def omega(self, layout: Layout, size: int) -> float:
        return float("inf")

    def policy(self, key: str) -> Policy:
        return "equal"

    def unit(self, key: str) -> Unit:
        return "gradient"

    def fits(self, binding: Binding) -> None:
        binding.refuse_momentum(self, self.momentum)
        refuse_long_table(self, self.rows * (self.columns or 0), binding)

    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        n = block.numel
        # The hashes are the same at every step.
        key = CounterRng(context.rng.seed, 0, 0).shared_key(f"{block.name}/fetch_sgd")
        if self.rows * self._columns(block.layout) >= n:
            return (yield from self._whole(block, state, context))
        mine = kernels.sketch_encode(block.flat.float(), self.rows, self._columns(block.layout), key)
        table = (yield from all_reduce(mine)) / context.size
        spoilt = peak(table).to(block.flat.dtype) * 0  # an estimate may be finite where one of its cells is not

        mark = f"{crc32(repr(block.layout.segments).encode()):08x}:{block.name}"
        velocity = table + self.momentum * state.get(f"velocity{mark}", 0.0)
        owed = velocity + state.get(f"owed{mark}", 0.0)
        into = block.layout.buffers.of(4 * n, table.device).view(torch.float32)
        estimates = kernels.sketch_estimate(owed, n, key, into)
        chosen = kernels.topk(estimates, count_of(self.ratio, n)).long()
        values = estimates[chosen]
        only = estimates.zero_().index_add_(0, chosen, values)
        said = kernels.sketch_encode(only, self.rows, table.shape[1], key)
        touched = said != 0
        state[f"owed{mark}"] = owed.masked_fill(touched, 0.0) if self.error == "zero" else owed - said
        state[f"velocity{mark}"] = velocity.masked_fill(touched, 0.0)
        return _echo(block, chosen, values.to(block.flat.dtype) + spoilt)

    def _whole(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        """Average a bucket that is no longer than its sketch: it is sent in full, without a residual."""
        total = yield from all_reduce(block.flat.clone())
        velocity = total / context.size + self.momentum * state.get("velocity", 0.0)
        state["velocity"] = velocity
        return _echo(block, torch.arange(block.numel, device=velocity.device), velocity)

    def _columns(self, layout: Layout) -> int:
        return 5 * ceil(self.ratio * layout.numel) if self.columns is None else self.columns


def _echo(block: Bucket, places: Tensor, values: Tensor) -> ReduceResult:
    """The result: each rank counts the extracted mean as sent, since a sum of sketches does not tell the ranks apart."""

    def add_sent(into: Tensor, weight: float) -> None:
        into.index_add_(0, places, values, alpha=weight)

    return ReduceResult(block.for_mean().zero_().index_add_(0, places, values), add_sent, peak(values))
