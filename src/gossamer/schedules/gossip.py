"""Mix parameters with a few neighbours."""

from typing import final

from gossamer.core.contracts import Loop, Schedule
from gossamer.core.parts import part, require
from gossamer.core.verbs import Descend, Program


@final
@part("gossip")
class Gossip(Schedule):
    """After every `every`-th step, one round of the recipe's mixer.

    With `overlap`, the messages of a round are absorbed at the next one, `every` steps later, and travel while the steps
    are computed (overlap stochastic gradient push). Meanwhile a rank holds only the rest of x and of w. Each local step
    is taken at z = x / w and moves x, so it moves z by 1 / w as much: twice, with one peer.

    Use: with an exchange that mixes, among many ranks that should not wait for all others; `overlap` where a link
    is slow.

    Not for: recipes that need equal models: the ranks' models differ.

    Wire: the mixer's bytes once per `every` steps.

    >>> Gossip(every=2, overlap=True)
    gossip(every=2, overlap=True)

    Paper: Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019.
    """

    every: int = 1
    overlap: bool = False

    def __post_init__(self) -> None:
        require(self.every >= 1, f"gossip: every must be at least 1 step, got {self.every}")

    @property
    def mixes(self) -> bool:
        return True

    def rests(self, step: int) -> bool:
        return (step + self.overlap) % self.every == 0  # messages of a round have had their time just before they land

    def step(self, loop: Loop) -> Program[None]:
        yield Descend()
        if loop.step % self.every:
            loop.settle_mix(loop.mixer)
            return
        round = loop.step // self.every - 1
        if not self.overlap:
            yield from loop.mix(loop.mixer, round)
            return
        yield from loop.land_mix(loop.mixer)
        yield from loop.launch_mix(loop.mixer, round)
