"""Nodes: schedules between nodes of several ranks, which hold equal models."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gossamer.codecs import FP32
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Context, LosslessExchange, Mixer, Policy, ReduceResult
from gossamer.core.contracts.mixer import Report
from gossamer.core.groups import within
from gossamer.core.rng import CounterRng
from gossamer.core.verbs import Program
from gossamer.exchanges import AllReduced
from gossamer.exchanges.as_one import Node, as_one

_DENSE = AllReduced(FP32())


@dataclass(frozen=True, repr=False)
class Inside(LosslessExchange):
    """Averages a bucket densely over the ranks of each node."""

    name: ClassVar[str] = "inside"

    ranks: int

    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        node = Node.of(context.rank, context.size, self.ranks)
        place = context._replace(rank=node.place, size=len(node.ranks))
        return (yield from within(_DENSE.average(block, state, place), node.ranks))


@dataclass(frozen=True, repr=False)
class Between(Mixer):
    """A mixer between nodes: the first rank of a node exchanges messages with other nodes, and passes them on.

    All ranks of a node push and absorb the same messages, so their state stays equal, bit for bit.
    """

    name: ClassVar[str] = "between"

    mixer: Mixer
    per_node: int

    @property
    def begins(self) -> bool:
        return self.mixer.begins

    @property
    def prelude(self) -> int:
        return self.mixer.prelude

    def policy(self, key: str) -> Policy:
        return self.mixer.policy(key)

    def numerator(self, block: Bucket, state: State) -> Tensor:
        return self.mixer.numerator(block, state)

    def push(self, block: Bucket, state: State, context: Context, round: int) -> Program[list[Tensor]]:
        node = Node.of(context.rank, context.size, self.per_node)
        first = CounterRng(context.rng.seed, context.rng.step, node.ranks[0])
        place = context._replace(rank=node.number, size=len(node.leaders), rng=first)
        program = self.mixer.push(block, state, place, round)
        return as_one(program, node, block.flat.device, block.layout.buffers)

    def heal(
        self, block: Bucket, state: State, arrived: Sequence[Tensor], report: Report
    ) -> tuple[Bucket, Sequence[Tensor]]:
        def of_rank(node: int | None, fine: bool | Tensor) -> bool | Tensor:
            return report(None if node is None else node * self.per_node, fine)

        return self.mixer.heal(block, state, arrived, of_rank)

    def absorb(self, block: Bucket, state: State, arrived: Sequence[Tensor]) -> Tensor:
        return self.mixer.absorb(block, state, arrived)

    def wrote(self, block: Bucket, state: State) -> None:
        self.mixer.wrote(block, state)

    def follow(
        self, pieces: Callable[[], Sequence[Tensor]], layout: Layout, state: State, arrived: Sequence[Tensor]
    ) -> Sequence[Tensor] | None:
        return self.mixer.follow(pieces, layout, state, arrived)


def groups_of(size: int, per_node: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups: the ranks of each node, and the first ranks of all nodes."""
    nodes = [Node.of(first, size, per_node) for first in range(0, size, per_node)]
    found = [*(node.ranks for node in nodes), nodes[0].leaders]
    return tuple(group for group in dict.fromkeys(found) if len(group) > 1)
