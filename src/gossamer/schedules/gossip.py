"""Mix parameters with a few neighbours."""

from typing import Annotated, final

from gossamer.core.contracts import Mixer
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice
from gossamer.core.schedule import Loop, Schedule, Share
from gossamer.core.terms import Term, bars, needs
from gossamer.core.verbs import Descend, Program
from gossamer.mixers import PushSum
from gossamer.schedules import mixing


@final
@part("gossip")
class Gossip(Schedule):
    """After every `every`-th step, one round of a mixer.

    With `overlap`, the messages of a round are absorbed at the next one, `every` steps later, and travel while the steps
    are computed (overlap stochastic gradient push). Meanwhile a rank holds only the rest of x and of w. Each local step
    is taken at z = x / w and moves x, so it moves z by 1 / w as much: twice, with one peer.

    Use: among many ranks that should not wait for all others; `overlap` where a link is slow.

    Not for: recipes that need equal models: the ranks' models differ.

    Wire: the mixer's bytes once per `every` steps.

    >>> Gossip(every=2, overlap=True)
    gossip(every=2, overlap=True)

    Paper: Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019.
    """

    mixer: Mixer = PushSum()
    every: Annotated[int, Choice(1, 2, 4)] = 1
    overlap: bool = False

    def __post_init__(self) -> None:
        require(self.every >= 1, f"gossip: every must be at least 1 step, got {self.every}")

    @property
    def drives(self) -> Mixer:
        return self.mixer

    @property
    def mixes(self) -> bool:
        return True

    @property
    def nests(self) -> bool:
        return True

    @property
    def terms(self) -> tuple[Term, ...]:
        return (
            bars(
                "memory",
                because="{memory} under {schedule}: with changing neighbours the error does not vanish, and push-sum "
                "conserves mass per coordinate; drop the memory",
            ),
            bars("singles out", because="{rules} cannot single out parameters under {schedule}: x and w travel as one"),
            bars("control", because="{controller} has no knob to turn under {schedule}"),
            needs(
                "exact",
                because="{exchange} under {schedule} would send nothing: whole models go from neighbour to neighbour, "
                "uncompressed; use 'allreduce(fp32()) + {schedule}', or '{exchange} + slowmo(48)'",
            ),
        )

    @property
    def period(self) -> int:
        return self.every

    def ends_round(self, step: int) -> bool:
        return (step + self.overlap) % self.every == 0  # messages of a round have had their time just before they land

    def judged(self, loop: Loop) -> list[Share]:
        return mixing.shares(loop, self.mixer)

    def step(self, loop: Loop) -> Program[None]:
        yield Descend()
        if loop.step % self.every:
            mixing.settle(loop, self.mixer)
            return
        round = loop.step // self.every - 1
        if not self.overlap:
            yield from mixing.mix(loop, self.mixer, round)
        else:
            yield from mixing.overlap(loop, self.mixer, round)

    def close(self, loop: Loop) -> Program[None]:
        yield from mixing.land(loop, self.mixer)
