"""Shards: of the slow state every rank keeps its own chunk of each block, and a round ends through the chunks' owners.

An owner is sent what all ranks hold of its chunk, makes the next anchor of it, and tells everybody. Differences are taken
and added in the order in which `scatter(fp32())` does it, so that no bit depends on where the state lies.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from gossamer.codecs import FP32
from gossamer.core.bucket import Bucket, Layout, PendingState, State
from gossamer.core.constraints import excludes, requires
from gossamer.core.contracts import Context, ReduceResult
from gossamer.core.loop import BucketView, Loop
from gossamer.core.lossless import LosslessExchange
from gossamer.core.verbs import Program
from gossamer.core.wire import take
from gossamer.exchanges.scatter import to_all, to_owners
from gossamer.schedules.rounds import OuterStep

_DENSE = FP32()

TERMS = (
    requires(
        "exact",
        because="{schedule} over {exchange}: ranks keep no anchor to send differences from, and send models, of which the codec "
        "would lose too much; use allreduce(fp32()), or leave sharded out",
    ),
    excludes(
        "memory",
        because="{memory} under {schedule}: models travel as they are, and nothing of them is held back; leave the memory out",
    ),
    excludes(
        "two levels",
        because="{exchange} under {schedule}: models go from each rank to every owner, past the levels; leave the nodes out, or "
        "sharded",
    ),
    excludes(
        "control",
        because="{controller} under {schedule}: it may cut the model into other blocks, of which every rank owns other elements; "
        "drop it, or leave sharded out",
    ),
)
"""What sharded slow state asks of a recipe."""


class Owner:
    """A rank as the owner of one chunk: what it keeps of it, and the step that it takes; without one the anchor stays."""

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
    """Models in, the next anchor out; where all ranks hold `alike` models, each owner goes by its own."""

    name: ClassVar[str] = "by_owners"

    alike: bool
    owners: Mapping[Layout, Owner] = field(compare=False)  # none on paper, where bytes are counted

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
            parts[j].flat.copy_(_numbers(wire, parts[j].layout))

        yield from to_all(_DENSE, wire, [c.layout for c in chunks], fill)
        return ReduceResult(anchor, lambda into, weight: None)


def _add_theirs(
    chunks: Sequence[Bucket], anchor: Tensor, moved: Tensor, state: State, context: Context
) -> Program[None]:
    """What this rank moved of its chunk becomes the mean of what all did."""
    theirs = chunks[context.rank].new()

    def add(j: int, wire: Tensor) -> None:
        if j != context.rank:
            moved.add_(torch.sub(anchor, _numbers(wire, chunks[context.rank].layout), out=theirs))

    yield from to_owners(_DENSE, chunks, lambda j: _DENSE.encode(chunks[j], state, context), add, context.rank)
    moved.div_(context.size)


def _numbers(wire: Tensor, layout: Layout) -> Tensor:
    return take(wire, layout.dtype, layout.numel)[0]


def remember(loop: Loop, held: Callable[[], Sequence[Tensor]]) -> None:
    """At the first step, a rank's chunk of the model that all start from; of parameters that join later, then."""
    if all("anchor" in state for state in loop.states):
        return
    for place, x in zip(loop.places, held()):
        own = _own(x, loop, place).clone()  # a view would keep all of it
        place.states["schedule"].setdefault("anchor", own)


def add_own(model: Tensor, shard: Tensor, times: float, loop: Loop, place: BucketView) -> None:
    """Add what this rank keeps to its chunk of a model."""
    _own(model, loop, place).add_(shard, alpha=times)


def _own(model: Tensor, loop: Loop, place: BucketView) -> Tensor:
    return Bucket(model, place.layout).chunks(loop.size)[loop.rank].flat


def close_round(loop: Loop, held: Sequence[Tensor], step: OuterStep, alike: bool) -> Program[bool]:
    """All ranks hold the next anchor, each a whole share of it; or the last one again, where the models' mean is not finite."""
    owners = _owners(loop, step)
    over = _ByOwners(alike, owners)
    if alike:
        anchors = yield from loop.local_average(held, over)
    else:
        anchors = yield from loop.average(held, over)
    if anchors is not None:
        for owner in owners.values():
            owner.draft.commit()
    loop.assign(anchors or (yield from _as_it_was(loop)))
    for state in loop.mixing:
        state.clear()
    return anchors is not None


def _as_it_was(loop: Loop) -> Program[list[Tensor]]:
    return (yield from loop.local_average(loop.parameters(), _ByOwners(True, _owners(loop, None))))


def _owners(loop: Loop, step: OuterStep | None) -> dict[Layout, Owner]:
    rates = zip(loop.places, loop.lrs)
    return {place.layout: Owner(place.states["schedule"], step, rate) for place, rate in rates}
