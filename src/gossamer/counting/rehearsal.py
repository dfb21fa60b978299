"""A schedule without training: when it asks for what."""

from collections.abc import Sequence
from contextlib import suppress
from math import ceil

import torch
from torch import Tensor

from gossamer.core.block import State
from gossamer.core.contracts import Mixer
from gossamer.core.errors import GossamerError
from gossamer.core.parts import require
from gossamer.core.verbs import Descend, Program
from gossamer.recipe import Recipe

MOST = 1_000_000  # steps, which take ten seconds or so
LEAST = 60  # steps to rehearse: whole periods of every topology that has up to six kinds of rounds


def span(recipe: Recipe) -> tuple[int, int]:
    """The first and the last step to rehearse: whole rounds, after the warm-up."""
    every = max(int(getattr(recipe.schedule, "every", 1)), 1)
    warmup = ceil(getattr(recipe.schedule, "warmup", 0) / every) * every
    require(
        every <= MOST, f"{recipe.schedule}: a round of more than {MOST:,} steps is not counted, for that takes too long"
    )
    return warmup + 1, warmup + every * ceil(LEAST / every)


class Rehearsal:
    """The loop around a model of one number: notes what a schedule asks of the network, and asks nobody."""

    def __init__(self, recipe: Recipe, step: int = 1) -> None:
        self.recipe, self.step = recipe, step
        self.averages = 0
        self.rounds = list[tuple[Mixer, int]]()
        self.lrs, self.gains, self.states = [1.0], [1.0], list[State]([{}])
        self._flight: list[Tensor] | None = None

    def take_step(self) -> None:
        steps, descended = self.recipe.schedule.step(self), None
        with suppress(StopIteration):
            while True:
                verb = steps.send(descended)
                if not isinstance(verb, Descend):
                    raise GossamerError(
                        f"{self.recipe.schedule} asks the network itself ({type(verb).__name__}); only what it asks of its "
                        "loop can be counted: use loop.average or loop.launch"
                    )
                descended = True
        self.step += 1

    @property
    def mixer(self) -> Mixer:
        assert isinstance(self.recipe.exchange, Mixer)
        return self.recipe.exchange

    def parameters(self) -> list[Tensor]:
        return [torch.zeros(1)]

    def assign(self, values: Sequence[Tensor]) -> None:
        pass

    def average_gradients(self) -> Program[None]:
        self.averages += 1
        yield from ()

    def average(self, values: Sequence[Tensor]) -> Program[list[Tensor] | None]:
        yield from self.launch(values)
        return (yield from self.land())

    def launch(self, values: Sequence[Tensor]) -> Program[None]:
        self.averages += 1
        self._flight = list(values)
        yield from ()

    def land(self) -> Program[list[Tensor] | None]:
        landed, self._flight = self._flight, None
        yield from ()
        return landed

    def in_flight(self) -> bool:
        return self._flight is not None

    def mix(self, mixer: Mixer, round: int) -> Program[None]:
        self.rounds.append((mixer, round))
        yield from ()

    launch_mix = mix

    def land_mix(self, mixer: Mixer) -> Program[None]:
        yield from ()

    def settle_mix(self, mixer: Mixer) -> None:
        pass

    def reset_optimizer(self) -> None:
        pass

    def average_optimizer(self) -> Program[None]:
        yield from ()
