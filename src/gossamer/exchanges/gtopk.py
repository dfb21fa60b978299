"""gTop-k: ranks merge their top-k elements pairwise on a tree, and keep k each time."""

from collections.abc import Iterator
from typing import Annotated, NamedTuple, final

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.codecs.topk import count_of
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Context, Exchange, ReduceResult
from gossamer.core.parts import part, require
from gossamer.core.ranges import LogRange
from gossamer.core.verbs import Program, receive, send
from gossamer.core.wire import expect, take
from gossamer.kernels.finite import peak

_PAIR = 8  # bytes of a value and its place


@final
@part("gtopk")
class GTopK(Exchange):
    """Global top-k: pairs of ranks add their k largest elements and keep the k largest sums; k = ceil(ratio n) of a bucket.

    The k sums go up a tree to rank 0; the last k go back to all ranks. The rank that merges keeps the sums that it drops in its
    memory: the sent part of a rank's gradient is its k largest elements less all sums that it dropped. So nothing is lost,
    whatever the number of ranks: a rank without a partner waits for the next round. (The authors' form counts the final k
    elements as sent by all ranks, and loses what merges dropped.) Biased: error feedback is needed.

    Use: in place of `topk` among many ranks: bytes do not grow with their number, and all add the same k elements.

    Not for: few ranks: messages go up the tree one after the other, and down again, where a gather sends them at once; nor where
    rank 0 has the slowest link: it sends and receives one message in each of log2 N rounds. With k elements for all ranks it
    learns less in a step than `topk`, which sends k of each rank.

    Wire: 4 k bytes of float32 values and 4 k of int32 indices, N - 1 times up and N - 1 times down: at most two messages per
    rank, on average.

    >>> GTopK(ratio=0.001)
    gtopk(ratio=0.001)

    Paper: Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks,
    ICDCS 2019.
    """

    ratio: Annotated[float, LogRange(0.001, 0.1)] = 0.01

    def __post_init__(self) -> None:
        require(0 < self.ratio <= 1, f"gtopk: ratio must lie in (0, 1], got {self.ratio}; 0.01 sends one percent")

    @property
    def unbiased(self) -> bool:
        return False

    @property
    def needs_feedback(self) -> bool:
        return True

    @property
    def contracts(self) -> bool:
        return True

    def omega(self, layout: Layout, size: int) -> float:
        return float("inf")

    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        if not block.numel:
            return ReduceResult(block.for_mean(), lambda into, weight: None)
        flat = block.flat.float()
        chosen = kernels.topk(flat, count_of(self.ratio, block.numel))
        mine = sums = _Elements(chosen, flat[chosen.long()])
        rejects = list[_Elements]()
        for other, reads in _rounds(context.rank, context.size):
            if not reads:
                yield from send(other, sums.wire(block))
                break
            came = _Elements.of((yield from receive(other, len(chosen) * _PAIR)), len(chosen), block.numel)
            sums, rejected = _merge(sums, came)
            rejects.append(rejected)
        agreed = yield from _publish(sums, block, context)
        values = agreed.values / context.size
        mean = block.for_mean().zero_()
        _Elements(agreed.places, values).add_to(mean, 1.0)

        def add_sent(into: Tensor, weight: float) -> None:
            mine.add_to(into, weight)
            for left_out in rejects:
                left_out.add_to(into, -weight)

        return ReduceResult(mean, add_sent, peak(values))


class _Elements(NamedTuple):
    """Some elements of a bucket: indices and values; an index may occur twice if all but one of its values are zero."""

    places: Tensor
    values: Tensor

    def wire(self, block: Bucket) -> Tensor:
        wire = block.layout.buffers.of(len(self.values) * _PAIR, self.values.device)
        values, places = wire.view(torch.float32).view(2, -1)
        values.copy_(self.values)
        places.view(torch.int32).copy_(self.places)
        return wire

    @staticmethod
    def of(wire: Tensor, count: int, numel: int) -> "_Elements":
        expect(wire, count * _PAIR, "gtopk")
        values, rest = take(wire, torch.float32, count)
        return _Elements(*kernels.within(take(rest, torch.int32, count)[0], values, numel))

    def add_to(self, into: Tensor, weight: float) -> None:
        into.index_add_(0, self.places.long(), self.values.to(into.dtype), alpha=weight)


def _rounds(rank: int, size: int) -> Iterator[tuple[int, bool]]:
    """Yield a rank's partners in turn, with True if it receives and False if it sends, which is its last round."""
    reach = 1
    while reach < size:
        if rank % (2 * reach):
            yield rank - reach, False
            return
        if rank + reach < size:
            yield rank + reach, True
        reach *= 2


def _merge(a: _Elements, b: _Elements) -> tuple[_Elements, _Elements]:
    """Add two sets of elements; return the k largest sums and all other sums."""
    places, order = torch.cat([a.places, b.places]).sort(stable=True)
    values = torch.cat([a.values, b.values])[order]
    new = torch.ones_like(places, dtype=torch.long)
    new[1:] = places[1:] != places[:-1]
    which = new.cumsum(0) - 1
    sums = torch.zeros_like(values).index_add_(0, which, values)
    there = torch.zeros_like(places).scatter_(0, which, places)  # unused entries are zero, at index 0
    largest = kernels.topk(sums, len(a.places)).long()
    return _Elements(there[largest], sums[largest]), _Elements(there, sums.index_fill(0, largest, 0.0))


def _publish(sums: _Elements, block: Bucket, context: Context) -> Program[_Elements]:
    """Send the final elements from rank 0 down the tree to all ranks."""
    rounds, count = [*_rounds(context.rank, context.size)], len(sums.places)
    if context.rank:
        above, _ = rounds.pop()
        sums = _Elements.of((yield from receive(above, count * _PAIR)), count, block.numel)
    wire = sums.wire(block)
    for below, _ in reversed(rounds):
        yield from send(below, wire)
    return sums
