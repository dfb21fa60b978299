"""Reports on whose model was not finite where models met, one rank and step at a time."""

from collections import Counter

from torch import Tensor

from gossamer.core.stream_events import read_numbers


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
