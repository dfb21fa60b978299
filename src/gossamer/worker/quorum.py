"""Backup workers, seen from one rank: a comm lane that is always there, and a compute lane that may be late."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gossamer.core.block import Block, Draft
from gossamer.core.contracts import Quorum, Seat, Settled
from gossamer.core.draw import Draw
from gossamer.core.errors import AttachError
from gossamer.core.verbs import Program, Start, Ticket, join, start
from gossamer.worker.finite import all_finite

if TYPE_CHECKING:
    from gossamer.worker.worker import Worker

LANE = "quorum"
KEPT = 1000  # steps of which it is remembered who was accepted


class Stand:
    """Keeps one program per step waiting on the comm lane; each starts its successor, so late ranks still answer."""

    def __init__(self, worker: "Worker") -> None:
        assert isinstance(worker.recipe.exchange, Quorum)
        self.worker, self.quorum = worker, worker.recipe.exchange
        if worker.size > 1:  # alone, a host trains without it
            self.quorum.check(worker.size)
        if len(worker.channels) != 1:
            raise AttachError(
                f"{self.quorum} closes a step with one ticket and one message, so all parameters must be of one "
                "precision and on one device"
            )
        self.channel = worker.channels[0]
        self.layout, self.like = self.channel.layout, self.channel.empty()
        self.offers = dict[int, tuple[Tensor, Tensor]]()
        self.tickets = dict[int, Ticket[Settled]]()
        self.entered = set[int]()
        self.spoilt = set[int]()  # steps whose mean is not finite: nobody applies it
        self.dropped = list[int]()
        self.accepted = dict[int, tuple[int, ...]]()
        self.apply: Callable[[Tensor, Tensor], None] = _no_catch_up
        self.on_late: Callable[[int], None] = _ignore

    def open(self) -> Program[None]:
        """Start waiting for the step that is being computed."""
        self.quorum.check(self.worker.size)
        step = self.worker.step
        self.tickets[step] = yield from start(self._program(step), self.channel.name, step, LANE)

    def offer(self, flat: Tensor) -> Program[None]:
        """My gradient for the step I computed is ready: put it where the comm lane finds it, then claim a ticket."""
        worker = self.worker
        if worker.step not in self.tickets:
            yield from self.open()
        rates = [float(g["lr"]) for g in worker.optimizer.param_groups]
        self.offers[worker.step] = flat, torch.tensor(rates, dtype=torch.float64)
        if worker.step not in self.entered:  # else it comes too late, and need not ask
            yield from self.quorum.claim(self._seat(worker.step))

    def average_gradients(self) -> Program[None]:
        """Take the agreed updates of my step and of all that closed meanwhile; the last is left for the optimizer."""
        worker = self.worker
        settled = yield from self._take(worker.step)
        while worker.step + 1 in self.entered:
            if worker.step not in self.spoilt:
                self.apply(settled.mean, settled.facts)
            self.spoilt.discard(worker.step)
            worker.step += 1
            settled = yield from self._take(worker.step)
        worker.means, worker.finite = [settled.mean], worker.step not in self.spoilt
        self.spoilt.discard(worker.step)
        self._set_rates(settled.facts)

    def _take(self, step: int) -> Program[Settled]:
        settled = yield from join(self.tickets.pop(step))
        self.entered.discard(step)
        offered = self.offers.pop(step, None)
        self.accepted[step] = settled.accepted
        self.accepted.pop(step - KEPT, None)
        if offered is not None and self.worker.rank not in settled.accepted:
            self.dropped.append(step)
            self.on_late(step)
        return settled

    def _set_rates(self, rates: Tensor) -> None:
        for group, rate in zip(self.worker.optimizer.param_groups, rates.tolist(), strict=True):
            group["lr"] = rate

    def _program(self, step: int) -> Program[Settled]:
        def offer() -> tuple[Tensor, Tensor] | None:
            return self.offers.get(step)

        rates, measures = len(self.worker.optimizer.param_groups), self.worker.measures(step)
        carried = Draft(self.channel.states["exchange"])
        inner = self.quorum.settle(Block(self.like, self.layout), carried, self._seat(step), offer, rates)
        settled = yield from self._noting_entry(inner, step)
        if measures and settled.add_sent is not None:
            self.worker.measure(Block(self.offers[step][0], self.layout), settled.add_sent)
        if all_finite([settled.mean]):
            carried.commit()
        else:
            self.spoilt.add(step)
        follow = Start(self._program(step + 1), self.channel.name, step + 1, LANE)
        self.tickets[step + 1] = yield follow
        return settled._replace(add_sent=None)

    def _noting_entry(self, inner: Program[Settled], step: int) -> Program[Settled]:
        """Pass requests through; once the first (the wait for the quorum) is answered, the step is closing."""
        answer = yield next(inner)
        self.entered.add(step)
        while True:
            try:
                verb = inner.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = yield verb

    def _seat(self, step: int) -> Seat:
        worker = self.worker
        return Seat(worker.rank, worker.size, step, Draw(worker.seed, step, worker.rank))


def _no_catch_up(mean: Tensor, rates: Tensor) -> None:
    raise AssertionError("a host must say how to apply a missed update")


def _ignore(step: int) -> None:
    pass
