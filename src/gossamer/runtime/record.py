"""The record of a run: what was dropped, skipped, spoilt and received late, for metrics and the ledger."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gossamer.core.events import Age, Drop, Event, Listener
from gossamer.core.loop import RecordView
from gossamer.core.stream_events import read_numbers
from gossamer.runtime.replica import WholeReplica

if TYPE_CHECKING:
    from gossamer.runtime.worker import Worker


class RunRecord(RecordView):
    """Counts what happened on this rank so far, and passes events on to a listener."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        self.listener: Listener | None = None
        self.skipped = 0  # steps without optimizer step
        self.lost_residual = 0.0  # norms of what lost ranks had not sent, as they last told them, summed
        self.dropped_rounds = 0  # averages of models that were not finite
        self.spoilt = Counter[int]()  # the number of averages that each rank made non-finite
        self.row = Counter[int]()  # and how many of them in a row, up to the last average
        self.models = FiniteReports()
        self.dropped_steps = list[int]()  # steps that ended without this rank's gradient
        self.accepted = Counter[int]()  # the number of steps with each rank's gradient, where not all are waited for
        self.last_accepted: tuple[int, ...] = ()
        self.closed_steps = 0  # the number of those steps
        self.ages = Counter[int]()  # the ages in steps of models received, where they depend on timing
        self.samples = list[Any]()  # the current batch's samples, as reported by the integration
        self.dropped_samples = dict[int, list[Any]]()  # and those of batches that came too late, by step

    def tell(self, event: Event) -> None:
        if self.listener is not None:
            self.listener(event)

    def closed(self, ranks: Sequence[int]) -> None:
        self.accepted.update(ranks)
        self.last_accepted = tuple(ranks)
        self.closed_steps += 1

    def dropped(self, step: int) -> None:
        self.dropped_steps.append(step)
        if self.samples:
            self.dropped_samples[step] = self.samples
        self.tell(Drop(step, self._worker.rank, [*self.samples]))

    def aged(self, steps: int) -> None:
        self.ages[steps] += 1
        self.tell(Age(self._worker.step, self._worker.rank, steps))

    def finite(self, rank: int | None, fine: bool | Tensor) -> bool | Tensor:
        if rank is None and not isinstance(self._worker.replica, WholeReplica):
            fine = self._worker.replica.all(bool(fine))
        self.models.hear(self._worker.ranks.number if rank is None else rank, self._worker.step, fine)
        if rank is None and fine is False:
            self._worker.optimizer_state.heal()
        return fine

    def round_dropped(self) -> None:
        self.dropped_rounds += 1
        self._worker.optimizer_state.heal()

    def spoilers(self) -> dict[int, int]:
        """How many averages each rank has spoilt, and of how many steps its model was left out."""
        return dict(sorted((self.spoilt + self.models.count()).items()))


class FiniteReports:
    """Counts steps at which a rank's model was left out. A device's answers add up there until somebody wants to know."""

    def __init__(self) -> None:
        self.first = dict[int, int]()  # rank: the first step at which its model was found not to be finite
        self._counts = Counter[int]()
        self._last = dict[int, int]()  # rank: the last step that was counted
        self._step = 0
        self._now = dict[int, Tensor]()  # of the step under way, on the device: is any block not finite?
        self._before = dict[int, Tensor]()  # of all steps before it

    def hear(self, rank: int, step: int, fine: bool | Tensor) -> None:
        if isinstance(fine, Tensor):
            self._note(rank, step, ~fine)
        elif not fine and self._last.get(rank) != step:
            self._last[rank] = step
            self._counts[rank] += 1
            self.first.setdefault(rank, step)

    def count(self) -> Counter[int]:
        """By rank; asks the device, where there is one."""
        self._fold()
        told = dict(zip(self._before, read_numbers(*self._before.values()), strict=True))
        self._before.clear()
        for rank, count in told.items():
            if count:
                self._counts[rank] += int(count)
                self.first.setdefault(rank, self._step)
        return self._counts

    def _note(self, rank: int, step: int, bad: Tensor) -> None:
        if step != self._step:
            self._fold()
            self._step = step
        self._now[rank] = self._now[rank] | bad if rank in self._now else bad

    def _fold(self) -> None:
        for rank, bad in self._now.items():
            self._before[rank] = self._before[rank] + bad if rank in self._before else bad.double()
        self._now.clear()
