"""Backup workers, seen from one rank: a comm lane that is always there, and a compute lane that may be late."""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gossamer.core.block import Block, Draft
from gossamer.core.contracts import Quorum, Seat, Settled
from gossamer.core.draw import Draw
from gossamer.core.errors import AttachError
from gossamer.core.verbs import Program, Start, Ticket, join, start
from gossamer.worker.finite import peak
from gossamer.worker.moments import Moment, ask, sent

if TYPE_CHECKING:
    from gossamer.worker.worker import Worker

LANE = "quorum"
KEPT = 1000  # steps of which it is remembered who was accepted


class Offer(NamedTuple):
    """A rank's gradient of one step, the moment its device has it, and the rates it would be applied with."""

    gradient: Tensor
    rates: Tensor
    ready: Moment


class Update(NamedTuple):
    """What a step came to: the same on all ranks."""

    mean: Tensor
    rates: list[float]
    fine: bool  # else nobody applies it


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
        self.layout = self.channel.layout
        self.offers = dict[int, Offer]()
        self.tickets = dict[int, Ticket[tuple[Settled, Tensor]]]()
        self.entered = set[int]()
        self.dropped = list[int]()
        self.accepted = dict[int, tuple[int, ...]]()
        self.apply: Callable[[Tensor, Sequence[float]], None] = _no_catch_up
        self.on_late: Callable[[int], None] = _ignore

    def open(self) -> Program[None]:
        """Start waiting for the step that is being computed."""
        self.quorum.check(self.worker.size)
        step = self.worker.step
        self.tickets[step] = yield from start(self._program(step), self.channel.name, step, LANE)

    def offer(self, flat: Tensor) -> Program[None]:
        """My gradient for the step I computed is ready: put it where the comm lane finds it, then claim a ticket.

        Not before the device has it: who is first is for the devices to say, not for hosts that run ahead of them.
        """
        worker = self.worker
        if worker.step not in self.tickets:
            yield from self.open()
        rates = torch.tensor([float(g["lr"]) for g in worker.optimizer.param_groups], dtype=torch.float64)
        self.offers[worker.step] = Offer(flat, rates, ready := Moment(flat.device))
        if worker.step not in self.entered:  # else it comes too late, and need not ask
            ready.wait()
            yield from self.quorum.claim(self._seat(worker.step))

    def average_gradients(self) -> Program[None]:
        """Take the agreed updates of my step and of all that closed meanwhile; the last is left for the optimizer."""
        worker = self.worker
        update = yield from self._take(worker.step)
        while worker.step + 1 in self.entered:
            if update.fine:
                self.apply(update.mean, update.rates)
            worker.step += 1
            update = yield from self._take(worker.step)
        worker.means, worker.finite = [update.mean], update.fine
        for group, rate in zip(worker.optimizer.param_groups, update.rates, strict=True):
            group["lr"] = rate

    def _take(self, step: int) -> Program[Update]:
        settled, told = yield from join(self.tickets.pop(step))
        *rates, largest = ask(told)
        self.entered.discard(step)
        offered = self.offers.pop(step, None)
        self.accepted[step] = settled.accepted
        self.accepted.pop(step - KEPT, None)
        if offered is not None and self.worker.rank not in settled.accepted:
            self.dropped.append(step)
            self.on_late(step)
        return Update(settled.mean, rates, isfinite(largest))

    def _program(self, step: int) -> Program[tuple[Settled, Tensor]]:
        """Settle a step; besides, all that the host will ask about it in one tensor: the rates, and the mean's peak."""

        def offer() -> tuple[Tensor, Tensor] | None:
            mine = self.offers.get(step)
            if mine is None:
                return None
            mine.ready.precedes()  # this lane began long before
            return mine.gradient, sent(mine.rates, mine.gradient.device)

        rates, measures = len(self.worker.optimizer.param_groups), self.worker.measures(step)
        carried = Draft(self.channel.states["exchange"])
        inner = self.quorum.settle(self._like(), carried, self._seat(step), offer, rates)
        settled = yield from self._noting_entry(inner, step)
        if measures and settled.add_sent is not None:
            self.worker.measure(Block(self.offers[step].gradient, self.layout), settled.add_sent)
        largest = peak(settled.mean)
        carried.commit_if(largest.isfinite())
        follow = Start(self._program(step + 1), self.channel.name, step + 1, LANE)
        self.tickets[step + 1] = yield follow
        told = torch.cat([settled.facts, largest.view(1)])
        return settled._replace(add_sent=None), told

    def _like(self) -> Block:
        """Where the gradient lies, and what it is made of; it has the room of one number."""
        p = self.channel.parameters[0]
        return Block(torch.zeros((), dtype=self.layout.dtype, device=p.device).expand(self.layout.numel), self.layout)

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


def _no_catch_up(mean: Tensor, rates: Sequence[float]) -> None:
    raise AssertionError("a host must say how to apply a missed update")


def _ignore(step: int) -> None:
    pass
