"""Mix parameters with a few neighbours."""

from dataclasses import replace
from math import lcm
from typing import Annotated, final

from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.constraints import Constraint
from gossamer.core.contracts import Mixer
from gossamer.core.errors import AttachError
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice
from gossamer.core.schedule import Schedule, Share
from gossamer.core.verbs import OptimizerStep, Program
from gossamer.exchanges.as_one import Node
from gossamer.mixers import PushSum
from gossamer.schedules import mixing
from gossamer.schedules.nodes import Between, Inside, groups_of


@final
@part("gossip")
class Gossip(Schedule):
    """After every `every`-th step, one round of a mixer.

    For the first `warmup` steps, and then at every `exact`-th one, models are averaged over all ranks instead, by the recipe's
    exchange (an all-reduce first, then gossip; gossip with a periodic exact average). Under plain SGD, with or without
    momentum, an average after each step is what an average of gradients is.

    With `overlap`, the messages of a round are absorbed at the next one, `every` steps later, and travel while the steps
    are computed (overlap stochastic gradient push). They land by schedule, so how long they take changes no bit. Meanwhile a
    rank that pushes sums holds only the rest of x and of w. Each local step is taken at z = x / w and moves x, so it moves z by
    1 / w as much: twice, with one peer.

    With `per_node`, so many ranks share a node, numbered node by node, and a node is one that gossips: its ranks average their
    gradients densely at every step, while backward runs, and take the step together; its first rank talks to those of other
    nodes, and tells its own what came. All ranks of a node hold the same model, bit for bit, and the run is that of one rank a
    node whose gradient is the node's mean. `sgp + per_node(8)` says so of a whole recipe; each node has equally many ranks.

    Use: among many ranks that should not wait for all others; `overlap` where a link is slow.

    Not for: recipes that need equal models: the ranks' models differ.

    Wire: the mixer's bytes once per `every` steps, and the exchange's for an exact average in its place; with `per_node` those
    of one rank through a node's card, and inside a dense average of gradients a step and what came, once for each other rank.

    >>> Gossip(every=2, overlap=True)
    gossip(every=2, overlap=True)
    >>> Gossip(exact=48)
    gossip(exact=48)
    >>> Gossip(per_node=8)
    gossip(per_node=8)

    Papers: Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019; Chen et al., Accelerating Gossip
    SGD with Periodic Global Averaging, ICML 2021.
    """

    mixer: Mixer = PushSum()
    every: Annotated[int, Choice(1, 2, 4)] = 1
    overlap: bool = False
    warmup: int = 0
    exact: int = 0
    per_node: int = 1

    def __post_init__(self) -> None:
        require(self.every >= 1, f"gossip: every must be at least 1 step, got {self.every}")
        require(self.warmup >= 0, f"gossip: warmup must be 0 steps or more, got {self.warmup}")
        require(
            self.exact == 0 or self.exact > self.every,
            f"gossip: exact must be 0 (never), or more steps than lie between two rounds ({self.every}), got {self.exact}; for "
            "exact averages only, use local_sgd()",
        )
        require(self.per_node >= 1, f"gossip: per_node is how many ranks a node has, 1 or more, got {self.per_node}")

    @property
    def drives(self) -> Mixer:
        return self.mixer if self.per_node == 1 else Between(self.mixer, self.per_node)

    def between_nodes(self, per_node: int) -> Schedule:
        return replace(self, per_node=per_node)

    @property
    def ranks_per_node(self) -> int:
        return max(self.per_node, super().ranks_per_node)

    def groups(self, size: int) -> tuple[tuple[int, ...], ...]:
        return groups_of(size, self.per_node) if self.per_node > 1 else super().groups(size)

    def fits(self, binding: Binding) -> None:
        if binding.size > self.per_node and binding.size % self.per_node:
            raise AttachError(
                f"{self}: {binding.size} ranks are not equally many on each node, and a node counts as one that gossips, however many "
                f"ranks it has: take a number of ranks that {self.per_node} divides, or a recipe that averages, such as "
                f"allreduce + per_node({self.per_node})"
            )
        super().fits(binding._replace(size=self._nodes(binding.size)))

    def _nodes(self, size: int) -> int:
        return max(size // self.per_node, 1)

    @property
    def mixes(self) -> bool:
        return not self.exact

    @property
    def nests(self) -> bool:
        return True

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        return mixing.whole_models(
            "with changing neighbours the error does not vanish, and push-sum conserves mass per coordinate; drop the memory, or "
            "compress with gossip(choco(topk()))",
            "x and w travel as one",
            "neighbour to neighbour, uncompressed; use 'allreduce(fp32()) + {schedule}', with choco() for its mixer to compress, "
            "or '{exchange} + slowmo(48)'",
        )

    @property
    def period(self) -> int:
        return lcm(self.every, self.exact or 1)

    @property
    def prelude(self) -> int:
        return max(self.warmup, self.mixer.prelude * self.every)

    def averages(self, step: int) -> bool:
        return self.per_node > 1

    def together(self, rank: int, size: int) -> tuple[int, ...]:
        return Node.of(rank, size, self.per_node).ranks

    def is_synced(self, step: int) -> bool:
        return step <= self.warmup or (self.exact > 0 and step % self.exact == 0)

    def ends_round(self, step: int) -> bool:
        """Messages of a round have had their time just before they land."""
        return self.is_synced(step) or (step + self.overlap) % self.every == 0

    def consensus_share(self, loop: Loop) -> list[Share]:
        return mixing.shares(loop, self.drives)

    def ready(self, loop: Loop, index: int, flat: Tensor) -> Program[None]:
        yield from loop.send(index, flat, Inside(self.per_node))

    def step(self, loop: Loop) -> Program[None]:
        if self.per_node > 1:
            yield from loop.average_gradients()
        yield OptimizerStep()
        if self._nodes(loop.size) > 1:
            yield from self._mix(loop)

    def _mix(self, loop: Loop) -> Program[None]:
        round, mixer = loop.step // self.every - 1, self.drives
        if self.is_synced(loop.step):
            yield from mixing.agree(loop, mixer)
        elif loop.step % self.every:
            mixing.settle(loop, mixer)
        elif self.overlap:
            yield from mixing.overlap(loop, mixer, round)
        else:
            yield from mixing.mix(loop, mixer, round)

    def close(self, loop: Loop) -> Program[None]:
        yield from mixing.land(loop, self.drives)
