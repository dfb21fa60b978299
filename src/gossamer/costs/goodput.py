"""Goodput: which share of the paid time of a run became steps that count, and where the rest went.

Durations are those of each process's own monotonic clock. Processes of different ranks are put in order by the numbers of their
steps, since the clocks of machines differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import add
from pathlib import Path
from typing import Literal, NamedTuple

from gossamer.costs.run_files import ProcessEvents, Quality, read_folder
from gossamer.costs.spent import Fate, Spent, spent_by, stretches, typical

Pays = Literal["machines", "processes"]
"""What is paid for: machines, also while a rank on them is between two processes, or only what processes take."""


class ProcessCost(NamedTuple):
    """One process, and the paid time between it and the next one of its rank."""

    events: ProcessEvents
    spent: Spent
    launching: float  # seconds of `spent` before the process began: its launcher was there first on that machine
    gap: float  # seconds in which its machine stood still, until the next process
    away: float | None  # seconds that were not paid; None: not known, as between machines


@dataclass(frozen=True)
class RankCost:
    """What a rank's processes took, one after the other."""

    rank: int
    processes: Sequence[ProcessCost]

    @property
    def spent(self) -> Spent:
        gaps = Spent(standing=sum(p.gap for p in self.processes))
        return reduce(add, (p.spent for p in self.processes), gaps)

    @property
    def last(self) -> int:
        """The highest step that it got to."""
        return max(p.events.last for p in self.processes)

    @property
    def has_ended(self) -> bool:
        """True if its last process ended in order."""
        return self.processes[-1].events.ended is not None

    def paid_until(self, step: int) -> float:
        """Paid seconds until this rank had done a step, for the last time; all of them where it never came so far."""
        covers = [i for i, p in enumerate(self.processes) if p.events.first < step <= p.events.last]
        later = [i for i, p in enumerate(self.processes) if p.events.first >= step]
        place = covers[-1] if covers else later[0] if later else len(self.processes)
        before = sum(p.spent.paid + p.gap for p in self.processes[:place])
        if not covers:
            return before
        return before + self.processes[place].launching + _moment(self.processes[place].events, step)


class HeldOut(NamedTuple):
    """A held-out value, and what all ranks had taken by then."""

    step: int
    value: float
    paid: float  # seconds


@dataclass(frozen=True)
class Goodput:
    """What a run took."""

    folder: Path
    ranks: Sequence[RankCost]
    held_out: Sequence[HeldOut]

    @property
    def spent(self) -> Spent:
        return reduce(add, (rank.spent for rank in self.ranks), Spent())

    @property
    def last(self) -> int:
        """The highest step of any rank."""
        return max(rank.last for rank in self.ranks)

    @property
    def recipe(self) -> str:
        """The recipe of the newest process; empty if none was attached."""
        named = [p.events.recipe for rank in self.ranks for p in rank.processes if p.events.recipe]
        return named[-1] if named else ""

    @property
    def cut(self) -> list[Path]:
        """Files whose last line is not whole."""
        return [p.events.path for rank in self.ranks for p in rank.processes if p.events.cut]

    @property
    def size(self) -> int:
        """Ranks that the run was started with."""
        return max(p.events.size for rank in self.ranks for p in rank.processes)

    @property
    def missing(self) -> list[int]:
        """Ranks of the run without a file."""
        there = {rank.rank for rank in self.ranks}
        return [rank for rank in range(self.size) if rank not in there]


def goodput_of(folder: Path, pays: Pays = "machines") -> Goodput:
    """Read what the processes of a run wrote, and tell where their time went. Raises CostError if it is no record of one run."""
    by_rank = read_folder(folder)
    lost = {rank for processes in by_rank.values() for p in processes for rank in p.lost}
    ranks = [_rank(number, processes, number in lost, pays) for number, processes in by_rank.items()]
    return Goodput(folder, ranks, _held_out(ranks))


def _rank(number: int, processes: Sequence[ProcessEvents], is_lost: bool, pays: Pays) -> RankCost:
    cut = [stretches(p) for p in processes]
    pace = {
        recipe: typical((s for p, c in zip(processes, cut) if (p.recipe, p.period) == recipe for s in c), recipe[1])
        for recipe in {(p.recipe, p.period) for p in processes}
    }
    fates = _fates(processes, is_lost)
    gaps = [_gap(a, b, pays) for a, b in pairwise(processes)] + [(0.0, 0.0)]
    costs = list[ProcessCost]()
    for i, (process, fate, gap) in enumerate(zip(processes, fates, gaps, strict=True)):
        launching = process.launching if not i or gaps[i - 1][1] is None else 0.0
        spent = spent_by(process, cut[i], pace[process.recipe, process.period], fate) + Spent(starting=launching)
        costs.append(ProcessCost(process, spent, launching, *gap))
    return RankCost(number, costs)


def _fates(processes: Sequence[ProcessEvents], is_lost: bool) -> list[Fate]:
    """What became of each process's steps, once it had ended.

    A later process that began at a lower step did the steps after it again. One that began higher has its model from others: of
    a process that was killed, they have all up to the end of its last round.
    """
    out = list[Fate]()
    for i, process in enumerate(processes):
        again = min((s.step for later in processes[i + 1 :] for s in later.begins), default=float("inf"))
        followed = i + 1 < len(processes) or is_lost
        lost = process.ended is None and followed and again >= process.last
        out.append(Fate(again, process.last - process.last % process.round if lost else float("inf")))
    return out


def _gap(one: ProcessEvents, next: ProcessEvents, pays: Pays) -> tuple[float, float | None]:
    """Paid seconds between two processes of a rank, and unpaid ones.

    A machine that was started anew, or another one, was not paid meanwhile, nor one that had ended its work in order.
    """
    between = one.before(next)
    if between is None:
        return 0.0, None
    between = max(0.0, between)
    is_paid = pays == "machines" and one.ended != "in order"
    return (between, 0.0) if is_paid else (0.0, between)


def _held_out(ranks: Sequence[RankCost]) -> list[HeldOut]:
    """The held-out values of the first rank that logged any; of a step that was done again, the later one."""
    for rank in ranks:
        told = dict[int, Quality]()
        for process in rank.processes:
            told = {step: q for step, q in told.items() if step <= process.events.first}
            told |= {q.step: q for q in process.events.qualities}
        if told:
            return [HeldOut(s, q.value, sum(r.paid_until(s) for r in ranks)) for s, q in sorted(told.items())]
    return []


def _moment(process: ProcessEvents, step: int) -> float:
    """When a process had done a step, by its own clock."""
    before = None
    for count in process.counts:
        if count.step >= step:
            if before is None or count.step == before.step:
                return count.at
            share = (step - before.step) / (count.step - before.step)
            return before.at + share * (count.at - before.at)
        before = count
    return process.end
