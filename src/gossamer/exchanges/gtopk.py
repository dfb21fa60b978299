"""gTop-k: ranks merge their largest elements two by two, and keep as many each time."""

from collections.abc import Iterator
from math import ceil
from typing import Annotated, NamedTuple, final

import torch
from torch import Tensor

from gossamer import kernels
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
    """The k largest of everybody's k largest, found on a tree and sent to all; k = ceil(ratio n) of a whole block.

    Two ranks' elements are added, and the k largest sums go on; the last k go back. What a merge leaves out is kept by the rank that merges, and so by its memory: what got through of mine are my k largest,
    less all that I have left out of sums. So nothing is lost, and books balance, whatever the number of ranks: one without
    a partner waits for the next round. (The authors' form takes what is in the end sent for sent by everybody, and loses
    what was left out on the way.) Biased: error feedback is needed.

    Use: in place of `topk` among many ranks: bytes do not grow with their number, and all add the same k elements.

    Not for: few ranks: messages go up the tree one after the other, and down again, where a gather's go at once; nor a first rank
    on the slowest link, which sends and receives one message in each of log2 N rounds. With k elements for all it learns less in
    a step than `topk`, which sends k of everybody's.

    Wire: 4 k bytes of float32 values and 4 k of int32 places, N - 1 times up and N - 1 times down: at most two a rank, on average.

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
        chosen = kernels.topk(flat, ceil(self.ratio * block.numel * (1 - 1e-12)))
        mine = sums = _Elements(chosen, flat[chosen.long()])
        rejects = list[_Elements]()
        for other, reads in _rounds(context.rank, context.size):
            if not reads:
                yield from send(other, sums.wire(block), [(other, len(chosen) * _PAIR)])
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
    """Some elements of a block; a place may come twice if its other values are zero."""

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
    """With whom a rank merges, and whether it reads what the other sends, until it sends itself. Rank 0 reads to the end."""
    reach = 1
    while reach < size:
        if rank % (2 * reach):
            yield rank - reach, False
            return
        if rank + reach < size:
            yield rank + reach, True
        reach *= 2


def _merge(a: _Elements, b: _Elements) -> tuple[_Elements, _Elements]:
    """The largest of the sums, as many as either has, and all others."""
    places, order = torch.cat([a.places, b.places]).sort(stable=True)
    values = torch.cat([a.values, b.values])[order]
    new = torch.ones_like(places, dtype=torch.long)
    new[1:] = places[1:] != places[:-1]
    which = new.cumsum(0) - 1
    sums = torch.zeros_like(values).index_add_(0, which, values)
    there = torch.zeros_like(places).scatter_(0, which, places)  # sums that are none are zero, at place 0
    largest = kernels.topk(sums, len(a.places)).long()
    return _Elements(there[largest], sums[largest]), _Elements(there, sums.index_fill(0, largest, 0.0))


def _publish(sums: _Elements, block: Bucket, context: Context) -> Program[_Elements]:
    """From rank 0 down the tree to all."""
    rounds, count = [*_rounds(context.rank, context.size)], len(sums.places)
    if context.rank:
        above, _ = rounds.pop()
        sums = _Elements.of((yield from receive(above, count * _PAIR)), count, block.numel)
    wire = sums.wire(block)
    for below, _ in reversed(rounds):
        yield from send(below, wire)
    return sums
