"""What a schedule promises: one training step."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gossamer.core.constraints import those
from gossamer.core.contracts import Mixer, Policy
from gossamer.core.loop import Loop
from gossamer.core.parts import Part
from gossamer.core.verbs import Program


class Share(NamedTuple):
    """What a rank adds to a model that is known in sums: that of the values, by that of the weights."""

    value: Tensor
    weight: Tensor


class Schedule(Part):
    """One training step: what is exchanged before and after the optimizer descends.

    Law: `step` yields Descend once, besides the steps that a rank has missed; all ranks start the same programs in the same
    order; what was launched lands by schedule, never by arrival, unless ranks go at their `is_async`; after a step that is
    `is_synced`, all ranks hold bit-equal models.
    """

    kind: ClassVar[str] = "schedule"

    lane: ClassVar[str] = ""
    """The lane of what a schedule keeps beside the steps; empty where it keeps nothing there."""

    outlives: ClassVar[bool] = False
    """True if ranks may die and come back, and it goes on with those who are there."""

    serves: ClassVar[bool] = False
    """True if some rank on that lane answers whoever calls first, until all who may call have left."""

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(
            averages_gradients=self.averages_gradients,
            mixes=self.mixes,
            counts_alike=self.counts_alike,
            is_async=self.is_async,
            own_step=self.lr_factor != 1,
            accumulates=self.accumulate != 1,
        )

    @property
    def averages_gradients(self) -> bool:
        """True if gradients are averaged before each descent, and may start on their way during backward."""
        return False

    @property
    def mixes(self) -> bool:
        """True if models are pulled together, and never agree exactly."""
        return False

    @property
    def counts_alike(self) -> bool:
        """True if some average on the way is not of what ranks count, but as if all counted alike."""
        return self.mixes or self.drives is not None

    @property
    def is_async(self) -> bool:
        """True if each rank counts steps of its own: it waits for nobody, and what is on its way lands whenever it comes."""
        return False

    @property
    def skips_steps(self) -> bool:
        """True if a rank may take fewer steps than it counts, so that only the ends of rounds find all ranks at one."""
        return False

    @property
    def works_alone(self) -> bool:
        """True if it is run on a rank that is alone as well; else that one trains plainly."""
        return self.averages_gradients

    @property
    def nests(self) -> bool:
        """True if it can go on inside of another schedule's rounds: it keeps no state of its own, and no lane."""
        return False

    @property
    def accumulate(self) -> int:
        """How many micro-batches make one step."""
        return 1

    @property
    def lr_factor(self) -> float:
        """What the learning rate is multiplied by while this schedule is in force."""
        return 1.0

    @property
    def drives(self) -> Mixer | None:
        """The mixer that it drives, if any."""
        return None

    def averages(self, step: int) -> bool:
        """True if gradients are averaged before this step's descent."""
        return self.averages_gradients

    def is_compressed(self, step: int) -> bool:
        """True if this step's mean is written coarsely on purpose, and others are not."""
        return False

    @property
    def trains_elsewhere(self) -> bool:
        """True if gradients are taken at another model than is judged, one that all ranks hold alike."""
        return False

    def policy(self, key: str) -> Policy:
        return "equal"

    @property
    def period(self) -> int:
        """After how many steps it asks for the same again, the rounds of its mixer apart."""
        return 1

    @property
    def prelude(self) -> int:
        """How many steps come before that, in another way."""
        return 0

    def fragment_of(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, int]:
        """The fragment of the model that each parameter is of: those of different ones never travel in one block."""
        return dict.fromkeys(shapes, 0)

    def ends_round(self, step: int) -> bool:
        """True if this is the last step of a round: after it is the time to judge, or to keep, the models."""
        return True

    def is_synced(self, step: int) -> bool:
        """True if all ranks hold equal models after this step."""
        return self.averages_gradients

    def resyncs(self, step: int) -> bool:
        """True if models that a memory lets part are equal after this step all the same."""
        return False

    def consensus_share(self, loop: Loop) -> list[Share] | None:
        """The model that the theory is about, as this rank's share of it; None where it is what every rank holds."""
        if self.averages_gradients:
            return None
        return [Share(x, torch.ones(())) for x in loop.parameters()]

    def begin(self, loop: Loop) -> Program[None]:
        """Before the forward pass: start what runs beside the steps."""
        yield from ()

    def ready(self, loop: Loop, index: int, flat: Tensor) -> Program[None]:
        """A block's gradient is there."""
        yield from loop.send(index, flat)

    @abstractmethod
    def step(self, loop: Loop) -> Program[None]: ...

    def close(self, loop: Loop) -> Program[None]:
        """The round that it goes on in ends: take in what is on its way."""
        yield from ()

    def quiesce(self, loop: Loop) -> Program[None]:
        """Wait for messages that are under way, without letting them land: afterwards the state is all there is."""
        yield from loop.wait()

    def rest(self, loop: Loop) -> Program[None]:
        """This rank takes no step for a while, and waits for nobody; others may go on, and must not wait for it."""
        yield from ()

    def reopen(self, loop: Loop) -> Program[None]:
        """What ran beside the steps is over, and begins anew: keep what it came to."""
        yield from ()

    def outlive(self, loop: Loop, failure: Exception) -> Program[None]:
        """Something that ranks do together has failed: go on with those who are there, where that can be; else raise it."""
        yield from ()
        raise failure

    def leave(self, loop: Loop) -> Program[None]:
        """This rank asks nobody for anything any more; called by whoever ends its lanes, perhaps after a failure."""
        yield from ()
