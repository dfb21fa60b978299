"""The most memory that a rank holds in a step: the recipe's own program is run on a small model, and its live bytes are counted."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import ceil, prod, sqrt
from typing import Any

import torch

from gossamer.core.bucket import Layout
from gossamer.core.errors import GossamerError
from gossamer.core.memory_pool import MemoryPool
from gossamer.costs.quantities import say_size
from gossamer.planning.dry_run import span
from gossamer.planning.live_bytes import FreshMemory, LiveBytes
from gossamer.planning.model_cost import ModelCost
from gossamer.planning.one_rank import OneRank
from gossamer.planning.pieces import Programs
from gossamer.recipe import Recipe
from gossamer.runtime import Worker
from gossamer.runtime.buckets import BucketState
from gossamer.runtime.params import Param, params_of

ELEMENTS = 2**20  # of a model that is rehearsed; a larger one is cut down to it, in proportion
BUCKETS = 12  # of a model that is rehearsed; of more, what one bucket takes follows from two coarser cuts
FEW = 4  # nodes; what more of them take lies on a line through so many and twice as many
ROUNDS = 3  # that are rehearsed: an average that takes a whole one has come once by the end of the second, with all it leaves
ENDS = 8  # steps at each end of a round that are rehearsed; of those between, only what the schedule does
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of a rank by kind; activations are not known."""

    model: float
    gradients: float
    optimizer: float
    keeps: float  # the recipe, between steps
    step: float  # what a step needs besides, at its peak
    is_least: bool = False  # a rank cannot be rehearsed alone: a step's part is then that of its buckets

    @property
    def training(self) -> float:
        """What training needs without the recipe."""
        return self.model + self.gradients + self.optimizer

    @property
    def peak(self) -> float:
        return self.training + self.keeps + self.step

    def in_words(self) -> str:
        """
        >>> PeakMemory(model=4e6, gradients=4e6, optimizer=4e6, keeps=0, step=4e6).in_words()
        'model 4 MB, gradients 4 MB, optimizer 4 MB, kept by the recipe 0 B, a step besides 4 MB'
        """
        kinds = "model", "gradients", "optimizer", "kept by the recipe", "a step besides" + " at least" * self.is_least
        lengths = self.model, self.gradients, self.optimizer, self.keeps, self.step
        return ", ".join(f"{kind} {say_size(length)}" for kind, length in zip(kinds, lengths, strict=True))


def memory_of(programs: Programs, model: ModelCost, keeps: float) -> PeakMemory:
    """What a rank holds at its peak if it runs these programs, and keeps so many bytes between steps."""
    cluster, recipe, unit = programs.cluster, programs.recipe, float(model.bytes)
    training = unit + model.frozen, unit, model.momenta * unit
    shapes, gathered = tuple(model.shapes.items()), model.gathered / unit
    rehearsal = _Rehearsal(str(recipe), shapes, model.dtype, cluster.has_gpus, gathered, recipe, programs.buckets)
    per_node = max(cluster.ranks_per_node // programs.sharing, 1)
    try:
        held = unit * _at_size(partial(_multiple, rehearsal), programs.size, per_node)
    except GossamerError:  # it depends on other ranks' answers
        return PeakMemory(*training, keeps, float(model.wide * model.numel + model.gathered), is_least=True)
    return PeakMemory(*training, keeps, max(held - 2 * unit - keeps, 0.0))


def _at_size(multiple: Callable[[int], float], size: int, per_node: int) -> float:
    """A figure of many ranks, from those of two small worlds; what falls with more ranks is not followed."""
    few, more = FEW * per_node, 2 * FEW * per_node
    if size <= more:
        return multiple(size)
    less, much = multiple(few), multiple(more)
    return much + max(much - less, 0.0) / (more - few) * (size - more)


@dataclass(frozen=True)
class _Rehearsal:
    """Steps of one rank on a model that is cut down, in buckets with the parts of the real ones."""

    text: str  # of the recipe
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: str
    on_device: bool
    gathered: float  # in multiples of the model's bytes
    recipe: Recipe = field(compare=False)
    buckets: Sequence[BucketState] = field(compare=False)

    def multiple(self, size: int) -> float:
        """The most live bytes, in multiples of the model's own."""
        real = len(self.buckets)
        if real <= BUCKETS:
            return self._live([[bucket] for bucket in self.buckets], size)
        coarse, fine = (_merged(self.buckets, count) for count in (2, 4))
        (x, less), (y, more) = ((1 / len(cut), self._live(cut, size)) for cut in (coarse, fine))
        # What all buckets hold at once stays as it is; what one holds at a time falls with their number.
        return more - max(less - more, 0.0) / (x - y) * (y - 1 / real) if x > y else more

    def _live(self, cut: Sequence[Sequence[BucketState]], size: int) -> float:
        scale = min(ELEMENTS / sum(bucket.layout.numel for bucket in self.buckets), 1.0)
        shapes = [_cut_down(group, scale) for group in cut]
        elements, width = sum(prod(shape) for each in shapes for shape in each.values()), DTYPES[self.dtype].itemsize
        with torch.random.fork_rng(devices=[]), LiveBytes() as live:
            rank = self._rank(cut, shapes, size)
            rank.whole = round(self.gathered * elements * width)
            every = self.recipe.schedule.shape.period
            for done in range(ROUNDS * every + 2):
                near = min(done % every, every - 1 - done % every) < ENDS
                rank.take_step() if near else rank.pass_step()
        return live.most / (elements * width)

    def _rank(
        self, cut: Sequence[Sequence[BucketState]], shapes: Sequence[Mapping[str, tuple[int, ...]]], size: int
    ) -> OneRank:
        named = {
            name: torch.zeros(shape, dtype=DTYPES[self.dtype], device="cpu").requires_grad_()
            for each in reversed(shapes)
            for name, shape in each.items()
        }
        optimizer = torch.optim.SGD(named.values(), lr=1e-3, foreach=False)
        worker = Worker(self.recipe, params_of(named), optimizer, 0, size)
        worker.buckets = [
            self._bucket(group[0], {name: worker.params[name] for name in each}, size)
            for group, each in zip(cut, shapes, strict=True)
        ]
        worker.step = span(self.recipe)[0]
        received = FreshMemory() if self.on_device else MemoryPool()
        return OneRank(worker, optimizer, received, own_stay=not self.on_device)

    def _bucket(self, like: BucketState, params: Mapping[str, Param], size: int) -> BucketState:
        layout = Layout.of({name: param.shape for name, param in params.items()}, like.layout.dtype)
        if self.on_device:
            layout.buffers = FreshMemory()
        shift = like.memory.follow(like.exchange.omega(layout, size))
        return BucketState(
            layout, tuple(params.values()), like.exchange, like.memory, shift, like.fragment, like.group, size
        )


@lru_cache(maxsize=1024)
def _multiple(rehearsal: _Rehearsal, size: int) -> float:
    """As often as a plan asks at other rates and latencies, a rank is rehearsed once."""
    return rehearsal.multiple(size)


def _merged(buckets: Sequence[BucketState], count: int) -> list[list[BucketState]]:
    """The buckets in at most `count` groups for each kind of them, in their order."""
    kinds = dict[Any, list[BucketState]]()
    for b in buckets:
        kinds.setdefault((b.exchange, b.memory, b.fragment, b.group, b.layout.dtype), []).append(b)
    lengths = [(kind, ceil(len(kind) / count)) for kind in kinds.values()]
    return [kind[i : i + length] for kind, length in lengths for i in range(0, len(kind), length)]


def _cut_down(group: Iterable[BucketState], scale: float) -> dict[str, tuple[int, ...]]:
    """The shapes of the group's parameters with about so many times as many elements; matrices are cut along both sides."""
    return {s.name: _scaled(s.shape, scale) for bucket in group for s in bucket.layout.segments}


def _scaled(shape: tuple[int, ...], scale: float) -> tuple[int, ...]:
    """
    >>> _scaled((1000,), 0.01), _scaled((100, 200, 3), 0.01), _scaled((), 0.01)
    ((10,), (10, 20, 3), ())
    """
    sides = min(len(shape), 2)
    factor = sqrt(scale) if sides == 2 else scale
    return (*(max(round(n * factor), 1) for n in shape[:sides]), *shape[sides:])
