"""Regrouping: what the ranks that are present say to one another, and do, after one was lost or has come."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from gossamer.core.errors import GossamerError
from gossamer.core.verbs import Present, Program, all_reduce
from gossamer.fabrics.torch.reunion import Reunion
from gossamer.integrations.handover import hand_over
from gossamer.integrations.handshake import tell
from gossamer.integrations.shared import SharedBuffers
from gossamer.kernels.finite import all_finite
from gossamer.runtime import Worker
from gossamer.runtime.ranks import FormerRanks


class ToldResiduals(Protocol):
    """The members, each of whom tells now and then what it has not sent yet."""

    owes: float
    wants_to_know: bool
    parted: set[tuple[int, int]]  # ranks and lives that have handed over what they owed

    @property
    def is_called(self) -> bool: ...

    def owed(self, ranks: list[int]) -> float: ...


class MemberFabric(Protocol):
    """The fabric of a rank, as far as regrouping needs it; without a reunion ranks are never a collective apart."""

    @property
    def present(self) -> Present: ...
    @property
    def members(self) -> ToldResiduals | None: ...
    @property
    def reunion(self) -> Reunion | None: ...


class Stepping(Protocol):
    """The steps of a rank that regroups: those of a training loop, or simulated ones."""

    stage: int
    worker: Worker
    shared: SharedBuffers

    @property
    def optimizers(self) -> Sequence[Optimizer]: ...
    @property
    def fabric(self) -> MemberFabric: ...


class Regrouping:
    """Continues a run with the members that are present, under recipes that all ranks step together in, or gossip.

    When ranks meet they are at the same collective (`fabrics/torch/last_collective.py`). Who comes, and who could not be brought
    there, takes all that is equal everywhere from the first rank that is furthest. It may come in the midst of a step that
    the others go on with: then it takes part in the rest.

    Where averages are in flight, ranks may be some steps apart, but the same averages have arrived on all. The others run again
    in the order of their launches, of each rank those that it has launched; so the order of all requests stays the same on all
    ranks. Who comes takes part in those of the giver, with no progress of its own.
    """

    def __init__(self, steps: Stepping, comes: bool) -> None:
        self._steps, self._worker, self._fabric = steps, steps.worker, steps.fabric
        self._comes, self._life = comes, steps.fabric.present.life
        self._joins = False  # True while this rank joins, and meets the others as one that comes
        self._before: FormerRanks | None = None  # while the ranks meet: those before the first failure
        self.rest = 0  # the stage of the step that others are in, which this rank has to take part in
        outlasts = self._worker.recipe.schedule.shape.outlasts
        self._mixes = outlasts == "models"
        self._worker.averaging.keeps = outlasts in ("round", "flights")
        self._worker.averaging.resumes = outlasts == "flights"
        self._worker.averaging.confirms = self._worker.recipe.ranks_per_node > 1
        self._reunion = self._fabric.reunion
        self.came_before = 0  # the step before which ranks last came
        if self._reunion is not None:
            self._reunion.opens(self.meet)

    def join_in(self) -> None:
        if self._reunion is not None:
            self._joins = True
            self._reunion.join_in()
            self._worker.replica.outlive(None)
            self._joins = self._comes = False

    def between_steps(self) -> None:
        """Tell what this rank owes, and let in ranks that have come."""
        members = self._fabric.members
        if self._reunion is None or members is None:
            return
        if members.wants_to_know:
            members.owes, members.wants_to_know = self._worker.residual_norm(), False
        replica = self._worker.replica
        if not replica.all(not members.is_called):  # all ranks that hold it: a node that comes joins them together
            self._reunion.admit()
            replica.outlive(None)

    def meet(self) -> Program[None]:
        """Agree on who gives and who takes; safe to be run again after a failure within."""
        worker, present = self._worker, self._fabric.present
        self._refuse_if_behind()
        comes = self._comes or present.life != self._life
        self._before = self._before or FormerRanks(0, worker.ranks.present, worker.ranks.weights)
        self._count_lost(comes)
        yield from worker.averaging.members_change()
        if self._steps.stage:
            worker.averaging.held.settle()
        done = self._reunion is None or self._reunion.resolved
        mine = {"comes": comes, "step": worker.step, "stage": self._steps.stage, "done": done}
        mine |= {"lost": worker.in_flight.lost, "flights": worker.in_flight.told()}
        everyone: list[dict[str, Any]] = yield from tell(mine, worker.device)
        at_work = [i for i, each in enumerate(everyone) if not each["comes"]]
        if not at_work:
            raise GossamerError(
                "all ranks that held the model are lost, and the ranks that joined do not have it; restart the run, from a "
                "checkpoint if there is one"
            )
        if comes:
            worker.ranks.former.clear()
        else:
            worker.ranks.change_after(max(_done(everyone[i]) for i in at_work), self._before)
        self._before = None
        giver = max(at_work, key=lambda i: (everyone[i]["step"], everyone[i]["stage"], -i))
        takes = [self._has_to_take(each, everyone[giver]) for each in everyone]
        if any(takes):
            yield from hand_over(self._steps.optimizers, worker, giver, takes[worker.rank], keeps=not comes)
        worker.averaging.taken += takes[worker.rank]
        if takes[worker.rank] and worker.averaging.resumes:
            worker.averaging.take_part_in(everyone[giver]["lost"], everyone[giver]["flights"])
        if self._mixes:
            yield from self._average_models(everyone, takes)
        self.rest = everyone[giver]["stage"] if takes[worker.rank] and not self._mixes else 0
        worker.averaging.renews = {*range(len(worker.buckets))}
        begun = everyone[giver]["step"] if everyone[giver]["stage"] else 0
        self._steps.shared.members_changed(takes[worker.rank], begun)
        if len(at_work) < len(everyone):
            self.came_before = _done(everyone[giver]) + 1  # this rank may be behind
        self._comes, self._life = self._comes and self._joins, present.life
        yield from worker.averaging.launch_again()

    def _has_to_take(self, one: dict[str, Any], giver: dict[str, Any]) -> bool:
        """True if a rank takes the giver's state: it comes, or could not be brought to where the giver is."""
        if self._mixes or self._worker.averaging.resumes:
            return bool(one["comes"])
        is_behind = (one["step"], one["stage"]) < (giver["step"], giver["stage"]) and not one["done"]
        return bool(one["comes"]) or is_behind

    def _refuse_if_behind(self) -> None:
        """Raise where others have an average in flight that this rank could not be given: it may be in the midst of a step."""
        if self._worker.averaging.resumes and self._reunion is not None and self._reunion.is_behind:
            raise GossamerError(
                f"rank {self._worker.ranks.number}, step {self._worker.step}: the members have changed, and the others have an average "
                "that this rank has not, and that cannot be given to it on this device; start this process again: it comes back "
                "with the state of the others, who go on"
            )

    def _count_lost(self, comes: bool) -> None:
        """Number the ranks anew; what lost ranks had not sent is lost, and counted."""
        worker, members = self._worker, self._fabric.members
        gone, lives = worker.ranks.present.without(self._fabric.present), dict[int, int]()
        lives |= zip(worker.ranks.present.ranks, worker.ranks.present.lives)
        left = [] if members is None else [r for r in gone if (r, lives[r]) in members.parted]
        lost = [r for r in gone if r not in left]
        if members is not None:
            members.parted.clear()
            if lost and not comes:
                worker.record.lost_residual += members.owed(lost)
        worker.ranks.renumber(self._fabric.present, left)

    def _average_models(self, everyone: list[dict[str, Any]], takes: list[bool]) -> Program[None]:
        """One exact average of the models, after which every rank has the weight 1; all go on with the same step."""
        worker = self._worker
        worker.in_flight.drop_messages()
        counts = not takes[worker.rank] and worker.replica.all(all_finite([b.read() for b in worker.buckets]))
        for bucket in worker.buckets:
            bucket.states["mixer"].clear()
            flat = bucket.read() if counts else bucket.empty()
            total = yield from all_reduce(torch.cat([flat, flat.new_full((1,), float(counts))]))
            if float(total[-1]):
                bucket.write(total[:-1] / total[-1])
        following = max(each["step"] + bool(each["stage"]) for each in everyone if not each["comes"])
        worker.step = following - bool(self._steps.stage)


def _done(one: dict[str, Any]) -> int:
    """How many steps a rank has done, and the batch of the next one is not taken yet, or is to be taken again."""
    return int(one["step"]) - 1 + bool(one["stage"])
