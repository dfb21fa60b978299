"""Leaving: how ranks are told to stop; under members() those who are hand over what they owe, and the others go on without them."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from gossamer.core.errors import AttachError
from gossamer.core.schedule import Elastic
from gossamer.core.verbs import MembersChanged, Program, all_reduce
from gossamer.fabrics.liveness.departure import Departure
from gossamer.fabrics.liveness.members import Members
from gossamer.fabrics.liveness.notice import Notice, OwnNotice
from gossamer.integrations.handshake import tell
from gossamer.integrations.shard_group import ShardGroup
from gossamer.kernels.finite import all_finite
from gossamer.schedules.handing_over import Debts

if TYPE_CHECKING:
    from gossamer.integrations.schedule_steps import ScheduleSteps


class Parting(ABC):
    """What a rank does about leaving after each of its steps."""

    def __init__(self, steps: "ScheduleSteps") -> None:
        self._worker, self._fabric = steps.worker, steps.fabric
        self.notice = OwnNotice()
        self.is_over = False  # True once this rank has nothing left to do but to end
        self.has_left = False  # True if the others go on without it; False where nobody does

    def after_step(self) -> None:
        """Leave, or go on without those who do, if it is time."""
        if self.is_over or not self._is_due():
            return
        told = self.notice.received is not None
        self.is_over, self.has_left = self._leave(told) if self._worker.size > 1 else (told, False)
        if self.has_left:
            self._fabric.close()

    @abstractmethod
    def _is_due(self) -> bool:
        """True if some rank leaves after this step."""

    @abstractmethod
    def _leave(self, told: bool) -> tuple[bool, bool]:
        """Hand over, or take on, what is owed: is it over for this rank, and has it left others that go on?"""

    def refuse_after_leaving(self) -> None:
        if self.has_left:
            raise AttachError(
                f"rank {self._fabric.rank} has left the members after step {self._worker.step - 1}, and the others train on without it: end "
                "the loop when `comm.stopping` is true"
            )

    def refuse_nodes(self) -> None:
        members = self._fabric.members
        if members is not None and members.node.size > 1:
            raise AttachError(
                "comm.leaving_at() where members are nodes of several ranks is not supported yet: a rank cannot leave alone; end the "
                "node's torchrun, and the others go on without what its ranks have learned since they were merged last"
            )


class StopNotice:
    """The notice of `comm.leaving_at`: before it is taken, nobody is told to stop."""

    def __init__(self, steps: "ScheduleSteps") -> None:
        self._steps, self._seconds = steps, math.inf
        self._notice: Notice | OwnNotice | None = None

    @contextmanager
    def taken(self, seconds: float) -> Generator[None]:
        """Take the signals; after the first one come so many `seconds`."""
        if self._notice is not None:
            raise AttachError("comm.leaving_at() was entered before: enter it once, around the whole loop")
        if not seconds > 0:
            raise AttachError(f"comm.leaving_at: seconds must be above 0, got {seconds!r}")
        self._notice, self._seconds = self._watched(), seconds
        self._steps.meter.watch(self._notice)
        with self._notice.on_signals():
            yield

    def _watched(self) -> Notice | OwnNotice:
        worker, fabric, parting = self._steps.worker, self._steps.fabric, self._steps.parting
        if parting is not None:
            parting.refuse_nodes()
            return parting.notice
        if isinstance(worker.replica, ShardGroup):
            return worker.replica.watch_for_notice(fabric, worker.device, worker.step - 1)
        return fabric.watch_for_notice()

    @property
    def is_over(self) -> bool:
        """True after the step after which all ranks stop; under `members()` once this rank has nothing left to do."""
        if isinstance(self._notice, Notice):
            return self._notice.may_stop(self._steps.worker.step - 1)
        return self._steps.parting is not None and self._steps.parting.is_over

    def warn_if_shorter_than(self, seconds: float) -> None:
        """Warn of a save that took so many seconds."""
        if seconds > self._seconds:
            warnings.warn(
                f"a save took {seconds:.3g} seconds, and a notice of {self._seconds:g} seconds is shorter: a run that is told "
                "to stop would be ended in its save. Save every few minutes besides, or to a faster disk",
                stacklevel=4,
            )


@final
class PartingTogether(Parting):
    """Under recipes that all ranks step together in, or gossip: they agree on a step, after which those who were told leave.

    All ranks run one program on the comm thread. Everything that changes is kept until a last sum has come: then it is changed on
    all, for whoever has that sum gives it to those who have not (`fabrics/torch/last_collective.py`). A second sum tells those who
    leave that the others have the first. So what is owed is never on both sides, nor on none.
    """

    def __init__(self, steps: "ScheduleSteps", members: Members) -> None:
        super().__init__(steps)
        self._members, self._departure = members, Departure(members, self.notice)

    def _is_due(self) -> bool:
        return self._departure.is_due(self._worker.step - 1)

    def _leave(self, told: bool) -> tuple[bool, bool]:
        worker, reunion, done = self._worker, self._fabric.reunion, self._worker.step - 1
        try:
            with self._fabric.during("leaving", done):
                self._fabric.run(worker.quiesce())
            leavers = self._fabric.join(self._fabric.start(self._part(told), "leaving", done))
        except MembersChanged:
            return False, False  # those who are left have met already, and agree anew
        if leavers and not told and reunion is not None:
            reunion.part_from([worker.ranks.present.ranks[i] for i in leavers])
        return told, told and len(leavers) < worker.size

    # -- on the comm thread ------------------------------------------------------------------------------------------------

    def _part(self, told: bool) -> Program[list[int]]:
        """Hand over what those who leave owe; returns their places. Nothing is handed over where all leave, who can save together."""
        worker = self._worker
        debts = Debts(worker.buckets)
        facts = {"leaves": told, "owes": debts.keys() if told else []}
        everyone: list[dict[str, Any]] = yield from tell(facts, worker.device)
        leavers = [i for i, each in enumerate(everyone) if each["leaves"]]
        if not leavers or len(leavers) == worker.size:
            return leavers
        models = yield from self._agreed_models()
        keys = zip(*(everyone[i]["owes"] for i in leavers), strict=True)  # by bucket
        owed = yield from debts.summed(told, [sorted({key for its in each for key in its}) for each in keys])
        yield from all_reduce(torch.ones(1, dtype=torch.float32, device=worker.device))
        self._change(models, leavers)
        if told:
            debts.let_go()
        else:
            debts.take_on(owed, worker.size - len(leavers))
        yield from all_reduce(torch.ones(1, dtype=torch.float32, device=worker.device))
        return leavers

    def _agreed_models(self) -> Program[list[Tensor]]:
        """The mean of all models, by bucket; empty where they are equal already.

        Under rounds anchors stay. So at the end of the round what a rank has learned in it before it left counts as that of each
        other one.
        """
        worker = self._worker
        shares = worker.recipe.schedule.consensus_share(worker.loop)
        if shares is None or worker.recipe.is_synced(worker.step - 1):
            return []
        counts, models = all_finite([share.value for share in shares]), list[Tensor]()
        for share in shares:
            total = yield from all_reduce(share.flat() if counts else share.flat().zero_())
            models.append(total[:-1] / total[-1] if float(total[-1]) else share.value)
        return models

    def _change(self, models: Sequence[Tensor], leavers: Sequence[int]) -> None:
        worker, present = self._worker, self._worker.ranks.present
        for bucket, model in zip(worker.buckets, models):
            bucket.write(model)
            bucket.states["mixer"].clear()
        if models:
            worker.in_flight.drop_messages()
        self._members.parted |= {(present.ranks[i], present.lives[i]) for i in leavers}


@final
class PartingAtOwnPace(Parting):
    """Under recipes whose ranks count their own steps: who is told has its steps merged, then all meet."""

    def _is_due(self) -> bool:
        return self.notice.received is not None

    def _leave(self, told: bool) -> tuple[bool, bool]:
        schedule, worker = self._worker.recipe.schedule, self._worker
        assert isinstance(schedule, Elastic)
        return True, self._fabric.run(schedule.depart(worker.loop), "leaving", worker.step - 1)
