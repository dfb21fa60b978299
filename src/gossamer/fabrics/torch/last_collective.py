"""Ranks that a failure left one collective apart: who has the answer of the last one gives it to those who have not.

A collective that waits for all ranks ends on a rank only when every rank has begun it. So when it fails, ranks that go on are at
most one collective apart: some have its answer and went on, others wait for it, and their programs can be driven on with it.
Afterwards all are at the same place, and none has to undo a step that it has taken.

Collectives among some ranks, such as those of a node, are not counted, and their answers are not given on: a task that fails in
one stays failed. So a program that ranks must end together ends with a collective of all.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.core.memory_pool import MemoryPool
from gossamer.core.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Compute,
    Now,
    Program,
    Shared,
    Verb,
    all_gather,
    all_reduce,
)
from gossamer.core.wire import Read
from gossamer.fabrics.torch.comm_thread import Task

NOTHING = -1  # in place of the generation, of a rank that has no earlier one
CPU = torch.device("cpu")


class BrokenTask(NamedTuple):
    """A task that failed in a collective, and the request of it; `arrived` if its answer is there."""

    task: Task
    verb: Verb
    arrived: bool
    answer: Any


class LastCollective:
    """One comm thread in one generation: how many collectives it has completed, and the answer of the last one.

    Costs a copy of each sum, while the comm thread would wait for the network; gathered wires are only kept longer.
    """

    def __init__(self, generation: int) -> None:
        self.generation, self.count = generation, 0
        self.whole = 0  # how many it had completed when the last task ended that came to its end
        self.broken: BrokenTask | None = None
        self._answer = list[Tensor]()
        self._wires = dict[int, Tensor]()  # of the gathering under way, as they were read
        self._pool = MemoryPool()

    # -- on the comm thread --------------------------------------------------------------------------------------------

    def heard(self, read: Read) -> Read:
        """The function that reads gathered wires, which are kept from now on."""
        self._wires = {}

        def reading(rank: int, wire: Tensor) -> None:
            self._wires[rank] = wire
            read(rank, wire)

        return reading

    def came(self, verb: Verb, answer: Any) -> None:
        """Count a collective that has ended."""
        match verb:
            case AllReduce(tensor) if tensor.numel():
                self._answer = [self._pool.like(answer).copy_(answer)]
            case AllGather(wire, read) if wire.numel():
                self._answer = list(answer) if read is None else [self._wires[r] for r in sorted(self._wires)]
            case AllToAll():
                self._answer = []
            case _:
                return
        self.count += 1

    def ended(self) -> None:
        """Note that a task has come to its end."""
        self.whole = self.count

    def broke(self, task: Task, verb: Verb, arrived: bool, answer: Any) -> None:
        self.broken = BrokenTask(task, verb, arrived, answer)

    # -- afterwards, on the training thread ----------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Bytes of the last answer; 0 if it cannot be given."""
        return sum(t.nbytes for t in self._answer)

    @property
    def is_resolved(self) -> bool:
        """True if no task failed, or the one that did has been driven to its end."""
        return self.broken is None or self.broken.task.error is None

    @property
    def broke_among_some(self) -> bool:
        """True if the broken task had asked some of the ranks only."""
        return self.broken is not None and isinstance(self.broken.verb, Shared) and self.broken.verb.among is not None

    @property
    def has_its_answer(self) -> bool:
        """True if the broken task can be driven on with the answer to its own request."""
        return self.broken is not None and self.broken.arrived and not (self.is_resolved or self.broke_among_some)

    def awaits(self, ranks: int) -> int:
        """Bytes of the answer that the broken task waits for; 0 if none can be given to it. `ranks` were there."""
        if self.broken is None or self.broken.arrived or self.broken.task.order is not None or self.broke_among_some:
            return 0
        match self.broken.verb:
            case AllReduce(tensor):
                return tensor.nbytes
            case AllGather(wire):
                return ranks * wire.numel()
            case _:
                return 0

    def give(self) -> Tensor:
        """The last answer as bytes."""
        return torch.cat([t.reshape(-1).contiguous().view(torch.uint8).to(CPU) for t in self._answer])

    def drive_on(self, answer: Any) -> None:
        """Drive the broken task on; its error goes if it comes to its end without another request to the network."""
        assert self.broken is not None
        task, program = self.broken.task, self.broken.task.program
        with torch.no_grad():
            try:
                while isinstance(verb := program.send(answer), Compute | Now):
                    answer = verb.work() if isinstance(verb, Compute) else time.monotonic()
            except StopIteration as end:
                task.result, task.error = end.value, None
                self.ended()
                return
        program.close()

    def take(self, bits: Tensor) -> None:
        """Drive the broken task on with an answer that another rank gives."""
        assert self.broken is not None
        self.count += 1
        match self.broken.verb:
            case AllReduce(tensor):
                shared = bits.view(tensor.dtype).view(tensor.shape)
                self.drive_on(tensor.copy_(shared))
            case AllGather(wire, read):
                wires = [w.to(wire.device) for w in bits.split(wire.numel())]
                if read is None:
                    self.drive_on(wires)
                    return
                for rank, came in enumerate(wires):
                    if rank not in self._wires:
                        read(rank, came)
                self.drive_on([])
            case _:
                raise TypeError(f"{type(self.broken.verb).__name__} has an answer of each rank's own")


class RankPosition(NamedTuple):
    """Where a rank was when its generation ended."""

    generation: int
    passed: int  # collectives that it has completed
    has: int  # bytes of the answer of the last collective
    awaits: int  # bytes of the answer that it waits for
    whole: int = 0  # collectives that it had completed when its last whole task ended

    @staticmethod
    def of(last: LastCollective | None, ranks: int) -> "RankPosition":
        if last is None:
            return RankPosition(NOTHING, 0, 0, 0)
        return RankPosition(last.generation, last.count, last.length, last.awaits(ranks), last.whole)


def level(last: LastCollective | None, ranks: int, rank: int, device: torch.device) -> Program[bool | None]:
    """Bring all ranks to the same collective; `last` is of the generation that ended, with `ranks` ranks. `rank` is this one now.

    Returns True if others have completed a task that this rank has not, and cannot; None if it cannot tell, since others have
    met again since its generation ended.
    """
    if last is not None and last.broken is not None and last.has_its_answer:
        last.drive_on(last.broken.answer)
    mine = RankPosition.of(last, ranks)
    wires = yield from all_gather(torch.tensor(mine, dtype=torch.int64).to(device).view(torch.uint8))
    positions = [RankPosition(*wire.clone().view(torch.int64).tolist()) for wire in wires]
    giver, takers = who_gives(positions)
    if giver is not None:
        length = positions[giver].has
        given = last.give() if rank == giver and last is not None else torch.zeros(length, dtype=torch.uint8)
        bits = yield from all_reduce(given.to(device))
        if last is not None and rank in takers:
            last.take(bits.to(CPU))
    latest = max(p.generation for p in positions)
    if last is None or last.generation < latest:
        return None
    return last.whole < max(p.whole for p in positions if p.generation == latest)


def who_gives(positions: Sequence[RankPosition]) -> tuple[int | None, list[int]]:
    """The first rank that has the answer that others wait for, and those; None where nobody waits for one.

    >>> ahead, behind, new = RankPosition(3, 8, 64, 0), RankPosition(3, 7, 64, 64), RankPosition(NOTHING, 0, 0, 0)
    >>> who_gives([behind, ahead, new, ahead])
    (1, [0])
    >>> who_gives([ahead, ahead])
    (None, [])
    """
    latest = max(p.generation for p in positions)
    there = {i: p for i, p in enumerate(positions) if p.generation == latest != NOTHING}
    most = max((p.passed for p in there.values()), default=0)
    for giver, its in _at(there, most).items():
        takers = [i for i, p in _at(there, most - 1).items() if p.awaits == its.has]
        if its.has and takers:
            return giver, takers
    return None, []


def _at(there: Mapping[int, RankPosition], count: int) -> dict[int, RankPosition]:
    return {i: p for i, p in there.items() if p.passed == count}
