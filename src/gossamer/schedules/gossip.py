"""Mix parameters with a few neighbours."""

from math import lcm
from typing import Annotated, final

from gossamer.core.constraints import Constraint
from gossamer.core.contracts import Mixer
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice
from gossamer.core.schedule import Schedule, Share
from gossamer.core.verbs import OptimizerStep, Program
from gossamer.mixers import PushSum
from gossamer.schedules import mixing


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

    Use: among many ranks that should not wait for all others; `overlap` where a link is slow.

    Not for: recipes that need equal models: the ranks' models differ.

    Wire: the mixer's bytes once per `every` steps, and the exchange's for an exact average in its place.

    >>> Gossip(every=2, overlap=True)
    gossip(every=2, overlap=True)
    >>> Gossip(exact=48)
    gossip(exact=48)

    Papers: Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019; Chen et al., Accelerating Gossip
    SGD with Periodic Global Averaging, ICML 2021.
    """

    mixer: Mixer = PushSum()
    every: Annotated[int, Choice(1, 2, 4)] = 1
    overlap: bool = False
    warmup: int = 0
    exact: int = 0

    def __post_init__(self) -> None:
        require(self.every >= 1, f"gossip: every must be at least 1 step, got {self.every}")
        require(self.warmup >= 0, f"gossip: warmup must be 0 steps or more, got {self.warmup}")
        require(
            self.exact == 0 or self.exact > self.every,
            f"gossip: exact must be 0 (never), or more steps than lie between two rounds ({self.every}), got {self.exact}; for "
            "exact averages only, use local_sgd()",
        )

    @property
    def drives(self) -> Mixer:
        return self.mixer

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

    def is_synced(self, step: int) -> bool:
        return step <= self.warmup or (self.exact > 0 and step % self.exact == 0)

    def ends_round(self, step: int) -> bool:
        """Messages of a round have had their time just before they land."""
        return self.is_synced(step) or (step + self.overlap) % self.every == 0

    def consensus_share(self, loop: Loop) -> list[Share]:
        return mixing.shares(loop, self.mixer)

    def step(self, loop: Loop) -> Program[None]:
        yield OptimizerStep()
        round = loop.step // self.every - 1
        if self.is_synced(loop.step):
            yield from mixing.agree(loop, self.mixer)
        elif loop.step % self.every:
            mixing.settle(loop, self.mixer)
        elif self.overlap:
            yield from mixing.overlap(loop, self.mixer, round)
        else:
            yield from mixing.mix(loop, self.mixer, round)

    def close(self, loop: Loop) -> Program[None]:
        yield from mixing.land(loop, self.mixer)
