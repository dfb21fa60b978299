"""The contract of a schedule: one training step, and what holds for all of them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

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

    @staticmethod
    def each(values: Iterable[Tensor]) -> "list[Share]":
        """Shares of one rank that counts once, by bucket."""
        return [Share(value, torch.ones((), dtype=torch.float32)) for value in values]

    def flat(self) -> Tensor:
        """A new tensor with the value, and the weight at its end."""
        return torch.cat([self.value, self.weight.to(self.value).view(1)])


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a schedule: what holds for every one of its steps."""

    period: int = 1  # steps after which its requests repeat, not counting the rounds of its mixer
    prelude: int = 0  # first steps, before its requests repeat
    averages_gradients: bool = False  # gradients are averaged before optimizer steps, and may be sent during backward
    # Each optimizer step is that of the mean of this very step's gradients of all ranks, and nothing else changes the model.
    steps_alike: bool = False
    mixer: Mixer | None = None  # the mixer that it drives
    syncs: bool = False  # all ranks hold equal models at the end of each round
    resyncs: bool = False  # they do although a memory lets models diverge meanwhile
    mixes: bool = False  # models are mixed between ranks and never agree exactly
    is_async: bool = False  # each rank counts its own steps, waits for no other, and takes results as they arrive
    skips_steps: bool = False  # a rank may take fewer steps than it counts: ranks meet at ends of rounds only
    works_alone: bool = False  # it also runs in a world of one rank; else that rank trains without it
    nests: bool = False  # it can run inside another schedule's rounds: it has no state of its own, and no comm thread
    hands_over: bool = True  # between steps nothing is in flight besides rounds, so another schedule may take over
    micro_batches: int = 1  # in one step
    lr_factor: float = 1.0  # on the learning rate while this schedule is in force
    counts_alike: bool = False  # some average gives all ranks equal weight, whatever their weights
    evaluates_another: bool = False  # the consensus is not the mean of the models that ranks train
    lane: str = ""  # the comm thread for programs that run between steps; empty where there are none
    # Under members(), what a change of members costs: the step under way is dropped ("step"), the round's average runs again
    # ("round"), averages in flight run again ("flights"), or models are averaged exactly ("models"); empty: it cannot go on.
    outlasts: Literal["", "step", "round", "flights", "models"] = ""
    serves: bool = False  # some rank on that comm thread answers requests as they arrive, until all clients have left


class Schedule(Part):
    """One training step: what is exchanged before and after the optimizer step.

    Law: `step` yields OptimizerStep once, besides the steps that a rank has missed; all ranks start the same programs in the same
    order; results are taken at scheduled steps, never by arrival, unless its shape `is_async`; after a step that is
    `is_synced`, all ranks hold bit-equal models. Classes below add what few schedules need.
    """

    kind: ClassVar[str] = "schedule"

    @cached_property
    def shape(self) -> Shape:
        """What holds for every step."""
        return Shape()

    @property
    def traits(self) -> frozenset[str]:
        shape, meets = self.shape, self.shape.mixes or self.shape.mixer is not None
        return super().traits | those(
            averages_gradients=shape.averages_gradients,
            mixes=shape.mixes,
            counts_alike=shape.counts_alike or meets,
            is_async=shape.is_async,
            own_step=shape.lr_factor != 1,
            accumulates=shape.micro_batches != 1,
            resyncs=shape.resyncs,
            rank_to_rank=meets and self.ranks_per_node == 1,
        )

    def averages(self, step: int) -> bool:
        """True if gradients are averaged before this optimizer step, among all ranks or those of a node."""
        return self.shape.averages_gradients

    def ends_round(self, step: int) -> bool:
        """True if this is the last step of a round, after which models should be evaluated or saved."""
        return self.shape.averages_gradients or step % self.shape.period == 0

    def is_synced(self, step: int) -> bool:
        """True if all ranks hold equal models after this step."""
        return self.shape.averages_gradients or (self.shape.syncs and self.ends_round(step))

    def policy(self, key: str) -> Policy:
        """What becomes of an entry of its state in a checkpoint that is loaded into another number of ranks."""
        return "equal"

    def fragment_of(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, int]:
        """The fragment of the model that each parameter belongs to; different fragments never share a bucket."""
        return dict.fromkeys(shapes, 0)

    def consensus_share(self, loop: Loop) -> list[Share] | None:
        """This rank's share of the consensus model, per bucket; None where every rank holds that model."""
        if self.shape.averages_gradients:
            return None
        return Share.each(loop.parameters())

    def begin(self, loop: Loop) -> Program[None]:
        """Start the programs that run between steps. Called before the forward pass."""
        yield from ()

    def ready(self, loop: Loop, index: int, flat: Tensor) -> Program[None]:
        """Handle a bucket's gradient, which is complete."""
        yield from loop.averages.send(index, flat)

    @abstractmethod
    def step(self, loop: Loop) -> Program[None]: ...

    def quiesce(self, loop: Loop) -> Program[None]:
        """Wait for messages in flight without applying them; afterwards the state is complete."""
        yield from loop.messages.wait()

    def leave(self, loop: Loop) -> Program[None]:
        """End this rank's requests. Called before its comm threads end, perhaps after a failure."""
        yield from ()


class BetweenNodes(ABC):
    """A schedule that can take a node of several ranks, which hold equal models, for one rank."""

    @abstractmethod
    def between_nodes(self, per_node: int) -> Schedule:
        """The same schedule for nodes of `per_node` ranks."""

    @abstractmethod
    def together(self, rank: int, size: int) -> tuple[int, ...]:
        """The ranks whose gradients are averaged with this one's: those of its node."""


def together(schedule: Schedule, rank: int, size: int) -> tuple[int, ...]:
    """The ranks whose gradients are averaged with this one's; if they are not all, they hold equal models after every step."""
    return schedule.together(rank, size) if isinstance(schedule, BetweenNodes) else tuple(range(size))


class Elastic(ABC):
    """A schedule under which ranks may be lost and come back; training goes on with the ranks that are present."""

    @abstractmethod
    def rest(self, loop: Loop) -> Program[None]:
        """Pause this rank's steps without waiting for others, which must not wait for it."""

    @abstractmethod
    def reopen(self, loop: Loop) -> Program[None]:
        """Restart the programs between steps after they ended, and keep their results."""

    @abstractmethod
    def outlive(self, loop: Loop, failure: Exception) -> Program[None]:
        """Continue with the ranks that are present after a collective failed; raise the failure where that is impossible."""

    @abstractmethod
    def depart(self, loop: Loop) -> Program[bool]:
        """Leave in good order, between two steps: give the others all that they have not; False if nobody stays."""


class TrainsElsewhere(ABC):
    """A schedule that computes gradients at another model than the one that is evaluated, equal on all ranks."""

    @abstractmethod
    def moves_in(self, loop: Loop) -> None:
        """Set the model to the one that the state describes, after a checkpoint of another number of ranks was loaded."""


class CompressesSome(ABC):
    """A schedule whose means are compressed at some steps, and exact at others."""

    @abstractmethod
    def is_compressed(self, step: int) -> bool:
        """True if this step's mean is compressed."""
