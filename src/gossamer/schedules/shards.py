"""Shards: every rank keeps one chunk of each bucket's slow state, and takes the outer step on its chunk.

An owner receives its chunk of all ranks' models, computes the next anchor of it, and sends that to all ranks. Differences are
taken and added in the order of `scatter(fp32())`, so results equal those without shards, bit for bit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from gossamer.codecs import FP32
from gossamer.core.bucket import Bucket, Chunks, Layout, PendingState, State
from gossamer.core.constraints import excludes, requires
from gossamer.core.contracts import Context, LosslessExchange, ReduceResult
from gossamer.core.loop import BucketView, Loop
from gossamer.core.verbs import Program
from gossamer.core.wire import take
from gossamer.exchanges.scatter import to_all, to_owners
from gossamer.schedules.rounds import OuterStep

_DENSE = FP32()

TERMS = (
    requires(
        "exact",
        because="{schedule} over {exchange}: ranks have no whole anchor and send models instead of differences, on which the codec's "
        "error would be too large; use allreduce(fp32()), or leave sharded out",
    ),
    excludes(
        "memory",
        because="{memory} under {schedule}: ranks send whole models, which leave no residual; leave the memory out",
    ),
    excludes(
        "two levels",
        because="{exchange} under {schedule}: each rank sends its model to every owner, not by way of its node; leave the nodes out, or "
        "sharded",
    ),
    excludes(
        "control",
        because="{controller} under {schedule}: it may change the buckets, and then every rank would own other elements; "
        "drop it, or leave sharded out",
    ),
)
"""The constraints of sharded slow state."""


class Owner:
    """The owner of one chunk: its slow state and its outer step; without a step the anchor stays."""

    def __init__(self, state: State, step: OuterStep | None, rate: float) -> None:
        self.draft, self._step, self._rate = PendingState(state), step, rate

    @property
    def anchor(self) -> Tensor:
        return self.draft["anchor"]

    def take(self, layout: Layout, moved: Tensor) -> None:
        if self._step is not None:
            self._step.follow(self.draft, layout, moved, self._rate)


@dataclass(frozen=True, repr=False)
class _ByOwners(LosslessExchange):
    """Takes models and returns the next anchor; with `alike`, all models are equal and owners use their own."""

    name: ClassVar[str] = "by_owners"

    alike: bool
    owners: Mapping[Layout, Owner] = field(compare=False)  # empty in a dry run, which only counts bytes

    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        chunks = block.chunks(context.size)
        mine = chunks[context.rank]
        owner = self.owners.get(block.layout) or Owner({"anchor": mine.flat.clone()}, None, 0.0)
        moved = torch.sub(owner.anchor, mine.flat, out=mine.new())
        if not self.alike:
            yield from _add_theirs(chunks, owner.anchor, moved, state, context)
        owner.take(mine.layout, moved)
        wire = _DENSE.encode(mine.like(owner.anchor), state, context)
        anchor = block.for_mean()
        parts = block.like(anchor).chunks(context.size)

        def fill(j: int, wire: Tensor) -> None:
            part = parts[j]
            part.flat.copy_(_numbers(wire, part.layout))

        yield from to_all(_DENSE, wire, block.layout, context.size, fill)
        return ReduceResult(anchor, lambda into, weight: None)


def _add_theirs(chunks: Chunks, anchor: Tensor, moved: Tensor, state: State, context: Context) -> Program[None]:
    """Turn `moved`, this rank's move of its chunk, into the mean over all ranks."""
    mine = chunks[context.rank]
    theirs = mine.new()

    def add(j: int, wire: Tensor) -> None:
        if j != context.rank:
            moved.add_(torch.sub(anchor, _numbers(wire, mine.layout), out=theirs))

    yield from to_owners(_DENSE, chunks, lambda j: _DENSE.encode(chunks[j], state, context), add, context.rank)
    moved.div_(context.size)


def _numbers(wire: Tensor, layout: Layout) -> Tensor:
    return take(wire, layout.dtype, layout.numel)[0]


def remember(loop: Loop, held: Callable[[], Sequence[Tensor]]) -> None:
    """Set the anchor to a rank's chunk of the first step's model; for parameters added later, when they are added."""
    if all("anchor" in state for state in loop.states):
        return
    for bucket, x in zip(loop.buckets, held()):
        own = own_chunk(x, loop, bucket).clone()  # a view would keep the whole model in memory
        bucket.states["schedule"].setdefault("anchor", own)


def own_chunk(model: Tensor, loop: Loop, bucket: BucketView) -> Tensor:
    """The chunk of a bucket that this rank owns."""
    return Bucket(model, bucket.layout).chunks(loop.ranks.size)[loop.ranks.rank].flat


def close_round(loop: Loop, held: Sequence[Tensor], step: OuterStep, alike: bool) -> Program[bool]:
    """Write the next anchor to the parameters; the last one, and return False, if the mean is not finite."""
    owners, averages = _owners(loop, step), loop.averages
    over = _ByOwners(alike, owners)
    means = (yield from averages.local(held, over)) if alike else (yield from averages.of(held, over))
    if means is None:
        loop.assign((yield from averages.local(loop.parameters(), _ByOwners(True, _owners(loop, None)))))
    else:
        for owner in owners.values():
            owner.draft.commit()
        loop.assign(means)
    for state in loop.mixing:
        state.clear()
    return means is not None


def _owners(loop: Loop, step: OuterStep | None) -> dict[Layout, Owner]:
    rates = zip(loop.buckets, loop.optimizer.lrs)
    return {bucket.layout: Owner(bucket.states["schedule"], step, rate) for bucket, rate in rates}
