"""SPARTA: after every step a small share of the parameters is averaged, the same elements on all ranks."""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, final

from torch import Tensor

from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.constraints import Constraint, those
from gossamer.core.contracts import Context, LosslessExchange, ReduceResult
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.ranges import LogRange
from gossamer.core.schedule import Schedule, Shape
from gossamer.core.verbs import OptimizerStep, Program, all_reduce
from gossamer.mixers.healing import is_finite
from gossamer.schedules import mixing


@final
@part("sparta", sample="sparta(0.25)")
class SPARTA(Schedule):
    """After every optimizer step averages a share of the parameters; the other elements stay each rank's own.

    x_i[S_t] = mean_j x_j[S_t], with S_t every P-th element of a bucket from a random place on, P = round(1 / share). The
    places come in a random order that is new in every cycle of P steps, so that each element is averaged once in a cycle.
    (The authors draw each element with probability `share`.) All ranks draw alike, and no places are sent. With share=1 it is
    `local_sgd(1)`, to rounding. Without gradients models are equal after a cycle.

    The models of ranks differ: evaluate under `comm.consensus()`, their mean. The optimizer's state is not averaged. A rank whose
    elements are not finite takes the mean of the others'. It also runs inside rounds: `slowmo(100, inner=sparta())`.

    Use: where a few bytes at every step can be borne, to keep models of local steps together, alone or inside long rounds.

    Not for: training that needs equal models on all ranks; links on which latency counts, since it sends at every step.

    Wire: 4 share d + 4 bytes per bucket in an all-reduce at every step.

    >>> SPARTA()
    sparta()
    >>> SPARTA(0.02).cycle
    50

    Paper: none was read; the method is SPARTA (sparse parameter averaging) of exogym, 2025.
    """

    share: Annotated[float, LogRange(0.005, 0.5)] = 0.005

    def __post_init__(self) -> None:
        require(0 < self.share <= 1, f"sparta: share must lie in (0, 1], got {self.share}; 0.005 is usual")

    @property
    def cycle(self) -> int:
        """The number of steps after which every element was averaged once."""
        return max(round(1 / self.share), 1)

    @cached_property
    def shape(self) -> Shape:
        return Shape(syncs=self.cycle == 1, mixes=self.cycle > 1, counts_alike=True, nests=True)

    @property
    def traits(self) -> frozenset[str]:
        return super().traits - those(rank_to_rank=True)  # it mixes by an all-reduce

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        return mixing.whole_models(
            "parameters are averaged and not gradients, so there is nothing that a residual could be added to; drop the memory",
            "elements of all parameters are averaged; drop the {rules}",
            "rank to rank, element by element and exactly; use 'allreduce(fp32()) + {schedule}'",
        )

    def step(self, loop: Loop) -> Program[None]:
        yield OptimizerStep()
        if loop.ranks.size == 1:
            return
        cycle, place = divmod(loop.step - 1, self.cycle)
        order = loop.ranks.context(cycle).rng.shared_normal("sparta/order", self.cycle).argsort()
        over = StridedMean(int(order[place]), self.cycle)
        models = loop.parameters()
        for x, bucket in zip(models, loop.buckets, strict=True):
            loop.record.finite(None, is_finite(over.taken(x, bucket.layout)))
        loop.assign((yield from loop.averages.local(models, over)))


@dataclass(frozen=True, repr=False)
class StridedMean(LosslessExchange):
    """Averages every `stride`-th element from `first` on over the ranks where all of them are finite; the others stay."""

    name: ClassVar[str] = "strided_mean"

    first: int
    stride: int

    def taken(self, flat: Tensor, layout: Layout) -> Tensor:
        """The elements that are averaged, one after the other."""
        strided = flat[self.first :: self.stride]
        room = layout.buffers.of(strided.numel() * strided.element_size(), flat.device)
        return room.view(flat.dtype).copy_(strided)

    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        own = self.taken(block.flat, block.layout)
        mine = block.layout.buffers.of((own.numel() + 1) * own.element_size(), own.device).view(own.dtype)
        mine[:-1].copy_(own)
        mine[-1:].fill_(1.0)
        fine = is_finite(own)
        if isinstance(fine, Tensor):
            mine.masked_fill_(~fine, 0.0)
        elif not fine:
            mine.zero_()
        total = yield from all_reduce(mine)
        merged = block.for_mean()
        merged.copy_(block.flat)
        merged[self.first :: self.stride] = total[:-1].div_(total[-1])

        def add_sent(into: Tensor, weight: float) -> None:
            into[self.first :: self.stride].add_(own, alpha=weight)

        return ReduceResult(merged, add_sent)
