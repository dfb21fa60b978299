"""Gossip: mix parameters with a few neighbours."""

from dataclasses import replace
from functools import cached_property
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
from gossamer.core.schedule import BetweenNodes, Schedule, Shape, Share
from gossamer.core.verbs import OptimizerStep, Program
from gossamer.exchanges.as_one import Node
from gossamer.mixers import PushSum
from gossamer.schedules import mixing
from gossamer.schedules.nodes import Between, Inside, groups_of


@final
@part("gossip")
class Gossip(Schedule, BetweenNodes):
    """Runs one round of a mixer after every `every`-th step.

    For the first `warmup` steps, and then at every `exact`-th step, models are averaged over all ranks instead, by the recipe's
    exchange. Under plain SGD, with or without momentum, averaging models after each step equals averaging gradients.

    With `overlap`, the messages of a round are absorbed at the next round, `every` steps later, and travel while the steps
    are computed (overlap stochastic gradient push). They are absorbed at a fixed step, so results do not depend on how long
    they take. Meanwhile a push-sum rank holds only the rest of x and of w. Each local step is taken at z = x / w and moves x,
    so it moves z by 1 / w as much: twice, with one peer.

    With `per_node`, so many consecutive ranks form a node, and the node gossips as one rank: its ranks average their
    gradients densely at every step, during backward, and take the same step; its first rank exchanges messages with other
    nodes, and passes them on inside its node. All ranks of a node hold the same model, bit for bit, and results equal those of
    one rank per node with the node's mean gradient. `sgp + per_node(8)` sets it for a whole recipe. All nodes need equally
    many ranks.

    Use: among many ranks that should not wait for all others; with `overlap` on slow links.

    Not for: training that needs equal models on all ranks.

    Wire: the mixer's bytes once per `every` steps, or the exchange's for an exact average. With `per_node` those of one rank
    through a node's network card; inside the node a dense average of gradients per step, and the messages to each other rank.

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
            f"gossip: exact must be 0 (never), or more than every ({self.every} steps), got {self.exact}; for "
            "exact averages only, use local_sgd()",
        )
        require(
            self.per_node >= 1,
            f"gossip: per_node, the number of ranks per node, must be 1 or more, got {self.per_node}",
        )

    @cached_property
    def _mixer(self) -> Mixer:
        return self.mixer if self.per_node == 1 else Between(self.mixer, self.per_node)

    @cached_property
    def shape(self) -> Shape:
        return Shape(
            period=lcm(self.every, self.exact or 1),
            prelude=max(self.warmup, self.mixer.prelude * self.every),
            mixer=self._mixer,
            mixes=not self.exact,
            nests=True,
            outlasts="models" if self.per_node == 1 and self.mixer.forgets else "",
        )

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
                f"{self}: {binding.size} ranks are not equally many on each node, and every node counts the same in gossip, however many "
                f"ranks it has; use a number of ranks that {self.per_node} divides, or a recipe that averages, such as "
                f"allreduce + per_node({self.per_node})"
            )
        super().fits(binding._replace(size=self._nodes(binding.size)))

    def _nodes(self, size: int) -> int:
        return max(size // self.per_node, 1)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        return mixing.whole_models(
            "with changing neighbours the error does not vanish, and push-sum must not lose any part of x or w; drop the memory, or "
            "compress with gossip(choco(topk()))",
            "x and w of all parameters travel in one message; drop the {rules}",
            "neighbour to neighbour, uncompressed; use 'allreduce(fp32()) + {schedule}', with choco() as its mixer to compress, "
            "or '{exchange} + slowmo(48)'",
        )

    def averages(self, step: int) -> bool:
        return self.per_node > 1

    def together(self, rank: int, size: int) -> tuple[int, ...]:
        return Node.of(rank, size, self.per_node).ranks

    def is_synced(self, step: int) -> bool:
        return step <= self.warmup or (self.exact > 0 and step % self.exact == 0)

    def ends_round(self, step: int) -> bool:
        """Return True just before the messages of a round are absorbed, or at an exact average."""
        return self.is_synced(step) or (step + self.overlap) % self.every == 0

    def consensus_share(self, loop: Loop) -> list[Share]:
        return mixing.shares(loop, self._mixer)

    def ready(self, loop: Loop, index: int, flat: Tensor) -> Program[None]:
        yield from loop.averages.send(index, flat, Inside(self.per_node))

    def step(self, loop: Loop) -> Program[None]:
        if self.per_node > 1:
            yield from loop.averages.wait_gradients()
        yield OptimizerStep()
        if self._nodes(loop.ranks.size) > 1:
            yield from self._mix(loop)

    def _mix(self, loop: Loop) -> Program[None]:
        round, mixer = loop.step // self.every - 1, self._mixer
        if self.is_synced(loop.step):
            yield from mixing.agree(loop, mixer)
        elif loop.step % self.every:
            mixing.settle(loop, mixer)
        elif self.overlap:
            yield from mixing.overlap(loop, mixer, round)
        else:
            yield from mixing.mix(loop, mixer, round)

    def close(self, loop: Loop) -> Program[None]:
        yield from mixing.land(loop, self._mixer)
