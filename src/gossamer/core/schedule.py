"""The contract of a schedule: one training step."""

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
    """A rank's share of the consensus model, which is the sum of all values divided by the sum of all weights."""

    value: Tensor
    weight: Tensor


class Schedule(Part):
    """One training step: what is exchanged before and after the optimizer step.

    Law: `step` yields OptimizerStep once, besides the steps that a rank has missed; all ranks start the same programs in the same
    order; results are taken at scheduled steps, never by arrival, unless the schedule `is_async`; after a step that is
    `is_synced`, all ranks hold bit-equal models.
    """

    kind: ClassVar[str] = "schedule"

    lane: ClassVar[str] = ""
    """The name of the comm thread for programs that run between steps; empty where there are none."""

    outlives: ClassVar[bool] = False
    """True if ranks may be lost and come back, and training goes on with the ranks that are present."""

    serves: ClassVar[bool] = False
    """True if some rank on that comm thread answers requests in order of arrival, until all clients have left."""

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(
            averages_gradients=self.averages_gradients,
            mixes=self.mixes,
            counts_alike=self.counts_alike,
            is_async=self.is_async,
            own_step=self.lr_factor != 1,
            accumulates=self.accumulate != 1,
            rank_to_rank=(self.mixes or self.drives is not None) and self.ranks_per_node == 1,
        )

    @property
    def averages_gradients(self) -> bool:
        """True if gradients are averaged before each optimizer step, and may be sent during backward."""
        return False

    @property
    def mixes(self) -> bool:
        """True if models are mixed between ranks and never agree exactly."""
        return False

    def between_nodes(self, per_node: int) -> "Schedule":
        """The same schedule for nodes of `per_node` ranks; unchanged where it only asks for averages."""
        return self

    @property
    def counts_alike(self) -> bool:
        """True if some average gives all ranks equal weight, whatever their weights."""
        return self.mixes or self.drives is not None

    @property
    def is_async(self) -> bool:
        """True if each rank counts its own steps, waits for no other rank, and takes results as they arrive."""
        return False

    @property
    def skips_steps(self) -> bool:
        """True if a rank may take fewer steps than it counts, so that all ranks are at the same step only at ends of rounds."""
        return False

    @property
    def works_alone(self) -> bool:
        """True if the schedule also runs in a world of one rank; else that rank trains without it."""
        return self.averages_gradients

    @property
    def nests(self) -> bool:
        """True if it can run inside another schedule's rounds: it has no state of its own, and no comm thread."""
        return False

    @property
    def hands_over(self) -> bool:
        """True if another schedule may take over after any step at which a controller is asked: all models are equal then, nothing
        is in flight, and no state of it is needed later.
        """
        steps = range(self.prelude + 1, self.prelude + self.period + 1)
        return not self.lane and not self.trains_elsewhere and any(map(self.is_synced, steps))

    @property
    def accumulate(self) -> int:
        """The number of micro-batches in one step."""
        return 1

    @property
    def lr_factor(self) -> float:
        """The factor on the learning rate while this schedule is in force."""
        return 1.0

    @property
    def drives(self) -> Mixer | None:
        """The mixer that it drives, if any."""
        return None

    def averages(self, step: int) -> bool:
        """True if gradients are averaged before this optimizer step, among all ranks or those that are `together`."""
        return self.averages_gradients

    def together(self, rank: int, size: int) -> tuple[int, ...]:
        """The ranks whose gradients are averaged with this one's where `averages` says so; if they are not all, they hold equal
        models after every step.
        """
        return tuple(range(size))

    def is_compressed(self, step: int) -> bool:
        """True if this step's mean is compressed and that of other steps is not."""
        return False

    @property
    def trains_elsewhere(self) -> bool:
        """True if gradients are computed at another model than the one that is evaluated, equal on all ranks."""
        return False

    def policy(self, key: str) -> Policy:
        return "equal"

    @property
    def period(self) -> int:
        """The number of steps after which its requests repeat, not counting the rounds of its mixer."""
        return 1

    @property
    def prelude(self) -> int:
        """The number of first steps, before its requests repeat."""
        return 0

    def fragment_of(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, int]:
        """The fragment of the model that each parameter belongs to; different fragments never share a bucket."""
        return dict.fromkeys(shapes, 0)

    def ends_round(self, step: int) -> bool:
        """True if this is the last step of a round, after which models should be evaluated or saved."""
        return True

    def is_synced(self, step: int) -> bool:
        """True if all ranks hold equal models after this step."""
        return self.averages_gradients

    def resyncs(self, step: int) -> bool:
        """True if models that a memory lets diverge are made equal at this step."""
        return False

    def consensus_share(self, loop: Loop) -> list[Share] | None:
        """This rank's share of the consensus model, per bucket; None where every rank holds that model."""
        if self.averages_gradients:
            return None
        return [Share(x, torch.ones((), dtype=torch.float32)) for x in loop.parameters()]

    def moves_in(self, loop: Loop) -> None:
        """Set the model to the one that the state describes, after a checkpoint of another number of ranks was loaded."""

    def begin(self, loop: Loop) -> Program[None]:
        """Start the programs that run between steps. Called before the forward pass."""
        yield from ()

    def ready(self, loop: Loop, index: int, flat: Tensor) -> Program[None]:
        """Handle a bucket's gradient, which is complete."""
        yield from loop.send(index, flat)

    @abstractmethod
    def step(self, loop: Loop) -> Program[None]: ...

    def close(self, loop: Loop) -> Program[None]:
        """Take the results in flight, at the end of the enclosing schedule's round."""
        yield from ()

    def quiesce(self, loop: Loop) -> Program[None]:
        """Wait for messages in flight without applying them; afterwards the state is complete."""
        yield from loop.wait()

    def rest(self, loop: Loop) -> Program[None]:
        """Pause this rank's steps without waiting for others, which must not wait for it."""
        yield from ()

    def reopen(self, loop: Loop) -> Program[None]:
        """Restart the programs between steps after they ended, and keep their results."""
        yield from ()

    def outlive(self, loop: Loop, failure: Exception) -> Program[None]:
        """Continue with the ranks that are present after a collective failed; raise the failure where that is impossible."""
        yield from ()
        raise failure

    def leave(self, loop: Loop) -> Program[None]:
        """End this rank's requests. Called before its comm threads end, perhaps after a failure."""
        yield from ()
