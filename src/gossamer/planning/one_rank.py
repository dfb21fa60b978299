"""One rank of a training, in this process: its worker takes real steps, and each request is answered as if all ranks sent the same.

What it holds is what a rank holds, for the worker, its schedule, codecs and memories are those of real ranks. The training loop's
part (gradients that arrive, their copies in buckets) follows `integrations`.
"""

from collections import deque
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket
from gossamer.core.canned_answers import answer_of
from gossamer.core.errors import CostError
from gossamer.core.groups import place
from gossamer.core.memory_pool import MemoryPool
from gossamer.core.programs import drive
from gossamer.core.step_phases import after_optimizer_step, until_optimizer_step
from gossamer.core.verbs import AllGather, AllToAll, Handle, Join, Program, Receive, Send, Start, Verb
from gossamer.core.wire import kept, receive_order, send_order
from gossamer.runtime import Worker
from gossamer.runtime.params import Param

T = TypeVar("T")
MOST_REQUESTS = 50_000  # a schedule that makes more in a step never ends one of its programs


@dataclass(eq=False)
class Waiting(Handle[Any]):
    """A program that was started, and its result once it has run."""

    lane: str
    program: Program[Any] | None
    result: Any = None

    def done(self) -> bool:
        return self.program is None


class OneRank:
    """Rank 0 of `size` takes steps on a model of these buckets; `received` is where wires from other ranks lie.

    A started program runs when it is waited for, after those that were started before it on its comm thread: on a slow network
    backward is over by then, and that is when a rank holds most. With `own_stay`, gradients stay where backward has put them after
    they were copied into their buckets, as they do on a processor.
    """

    whole = 0  # bytes of whole layers that backward holds, where a rank has a shard of the model

    def __init__(self, worker: Worker, optimizer: torch.optim.Optimizer, received: MemoryPool, own_stay: bool) -> None:
        self.worker, self._optimizer, self._received, self._own_stay = worker, optimizer, received, own_stay
        self._lanes, self._flats = dict[str, deque[Waiting]](), list[Tensor]()
        self._sent: Tensor | None = None  # the last wire that was sent to one rank
        self._requests = 0
        self._noise = torch.Generator().manual_seed(0)
        worker.averaging.hand_over = worker.update_step.put

    def take_step(self) -> None:
        """The gradients of the last step are dropped, a backward pass makes new ones, and the optimizer steps."""
        worker, schedule, self._requests = self.worker, self.worker.recipe.schedule, 0
        for param in worker.params.values():
            param.forget_gradient()
        worker.averaging.means = []
        if schedule.shape.lane:
            self._run(worker.begin())
        averages = schedule.averages(worker.step)
        whole = torch.empty(self.whole, dtype=torch.uint8, device="cpu")
        self._backward(averages)
        steps = worker.steps()
        while missed := self._run(until_optimizer_step(steps)):
            worker.update_step.make_up(missed, self._optimizer.step)
        del whole  # not before: on a fast network gradients are averaged while backward goes on
        if averages:
            worker.update_step.put()
        worker.redirect()
        worker.update_step.enter(self._optimizer)
        self._optimizer.step()
        worker.update_step.leave(self._optimizer)
        self._run(after_optimizer_step(steps, True))
        worker.end_step(True)

    def pass_step(self) -> None:
        """The schedule alone goes on; model and gradients stay, and take as many bytes. What averages them was seen in steps before."""
        worker, schedule, self._requests = self.worker, self.worker.recipe.schedule, 0
        if schedule.averages(worker.step):
            worker.step += 1
            return
        if schedule.shape.lane:
            self._run(worker.begin())
        steps = worker.steps()
        self._run(until_optimizer_step(steps))
        self._run(after_optimizer_step(steps, True))
        worker.end_step(True)

    def _backward(self, averages: bool) -> None:
        buckets = self.worker.buckets
        if averages and not self._flats:
            self._flats = [bucket.empty() for bucket in buckets]
        for i, bucket in enumerate(buckets):
            slots = [view for _, view in Bucket(self._flats[i], bucket.layout).tensors()] if averages else []
            for param, slot in zip_longest(bucket.params, slots):
                self._arrives(param, slot)
            if averages:
                self._run(self.worker.ready(i, self._flats[i]))

    def _arrives(self, param: Param, slot: Tensor | None) -> None:
        """Backward makes a gradient; it is copied into its bucket, and on a device freed then."""
        own = torch.empty_like(param.values)
        param.hand(own.fill_(1e-3) if slot is None else own.normal_(std=1e-3, generator=self._noise))
        if slot is None:
            return
        slot.copy_(own)
        if not self._own_stay and param.takes(slot):
            param.hand(slot)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _run(self, program: Program[T]) -> T:
        return drive(program, self._answer)

    def _answer(self, verb: Verb) -> Any:
        self._requests += 1
        if self._requests > MOST_REQUESTS:
            raise CostError(f"{self.worker.recipe.schedule} makes requests without end where all ranks send the same")
        match verb:
            case Start(program, _, _, lane):
                started = Waiting(lane, program)
                self._lanes.setdefault(lane, deque()).append(started)
                return started
            case Join(Waiting() as started):
                return self._joined(started)
            case AllGather():
                return self._gathered(verb)
            case AllToAll():
                return self._exchanged(verb)
            case Send(_, wire):
                self._sent = wire
                return None
            case Receive(source, length):
                wire = self._letter(length)
                return (0, wire) if source is None else wire
            case _:
                return answer_of(verb, place(verb, 0, self.worker.size)[1])

    def _joined(self, started: Waiting) -> Any:
        lane = self._lanes[started.lane]
        while not started.done():
            first = lane.popleft()
            assert first.program is not None
            first.result = self._run(first.program)
            first.program = None
        return started.result

    def _arrived(self, wire: Tensor, length: int) -> Tensor:
        """A wire of another rank: it has the bytes of this rank's own, or zeros where that has another length."""
        out = self._received.of(length, torch.device("cpu"))
        return out.copy_(wire) if wire.numel() == length else out.zero_()

    def _letter(self, length: int) -> Tensor:
        own, self._sent = self._sent, None
        return self._arrived(torch.empty(0, dtype=torch.uint8, device="cpu") if own is None else own, length)

    def _gathered(self, verb: AllGather) -> list[Tensor]:
        """As gloo does: all wires at once, or one that is read while the next one comes."""
        wire, (rank, size) = verb.wire, place(verb, 0, self.worker.size)
        if verb.read is None:
            rows = self._received.of(size * wire.numel(), wire.device).view(size, wire.numel())
            return [*rows.copy_(wire)]
        came = wire
        for source in receive_order(rank, size):
            coming = self._arrived(wire, wire.numel())
            verb.read(source, came)
            came = coming
        return []

    def _exchanged(self, verb: AllToAll) -> list[Tensor]:
        """As gloo does: in pairs, while the last wire is read and the next one is made."""
        rank, size = place(verb, 0, self.worker.size)
        to, sources, answer = send_order(rank, size), receive_order(rank, size), dict[int, Tensor]()
        take = answer.__setitem__ if verb.read is None else verb.read
        came = kept(verb.wires[rank])
        leaving = kept(verb.wires[to[1]]) if size > 1 else came
        for i, source in enumerate(sources[1:], start=1):
            coming = self._arrived(came, verb.lengths[source])  # others send what this rank has for itself
            take(sources[i - 1], came)
            leaving = kept(verb.wires[to[i + 1]]) if i + 1 < size else leaving
            came = coming
        take(sources[-1], came)
        return [answer[j] for j in range(size)] if verb.read is None else []
