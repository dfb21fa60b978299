"""The server of asynchronous SGD: the rank that holds the model, and answers other ranks beside its own training.

Which thread writes what: only the training thread writes parameters. The model `x` and its `number` are in the checkpoint's
state; the comm thread and the training thread both replace them, under a lock. A tensor that has been `x` is never written to:
it may be in flight to a rank.
"""

from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.errors import WireError
from gossamer.core.loop import Loop
from gossamer.core.stream_events import StreamMark, record_stream_use
from gossamer.core.verbs import Handle, Program, join, receive, receive_first, send, start
from gossamer.core.wire import pack, take
from gossamer.schedules.pair_server import GOODBYE, WORD, word


def report(server: int, taken: int, move: Bucket) -> Program[list[Tensor]]:
    """Send a step that began at model number `taken`; returns the new model's number, and the model."""
    wire = pack(move.flat)
    yield from send(server, word(taken, move.flat.device))
    yield from send(server, wire, [(server, WORD), (server, wire.numel())])
    number = yield from receive(server, WORD)
    return [number, (yield from receive(server, wire.numel()))]


def answer(caller: int, length: int, add: Callable[[Tensor], tuple[int, Tensor]]) -> Program[None]:
    """Answer `report`: receive the step, call `add` with it, send back the number and the model that it returns."""
    number, model = add((yield from receive(caller, length)))
    yield from send(caller, word(number, model.device))
    yield from send(caller, pack(model))


def number_in(message: Tensor) -> int:
    return int(message.clone().view(torch.int64))


class Server:
    """Holds the model on one rank, adds steps to it, and answers the other ranks on a comm thread."""

    def __init__(self, loop: Loop, by_staleness: bool, lane: str) -> None:
        self._loop, self._by_staleness, self._lane = loop, by_staleness, lane
        (bucket,), (state,) = loop.buckets, loop.mixing
        if "x" not in state:
            state["x"] = bucket.read()
        self._layout, self._lock, self._done = bucket.layout, Lock(), StreamMark(bucket.device)
        self._handle: Handle[Any] | None = None

    def open(self) -> Program[None]:
        self._handle = yield from start(self._serve(), "server", lane=self._lane)

    def look(self) -> Program[None]:
        """Raise here, on the training thread, an error of the comm thread."""
        if self._handle is not None and self._handle.done():
            yield from join(self._handle)

    def model(self) -> Tensor:
        with self._lock:
            self._done.precedes()
            (state,) = self._loop.mixing
            record_stream_use([state["x"]])
            return state["x"]

    def add(self, move: Tensor, taken: int) -> tuple[int, Tensor]:
        """Add a step that began at model number `taken`; returns the new model's number, and the new model."""
        with self._lock:
            self._done.precedes()
            (state,) = self._loop.mixing
            stale = number_of(state, "number") - taken
            if stale < 0:
                raise WireError(
                    f"a rank sent a step from model number {taken}, and the newest is {taken + stale}; check that all ranks run the "
                    "same version and recipe"
                )
            share = 1 / stale if self._by_staleness and stale > 1 else 1.0
            record_stream_use([state["x"]])
            state["x"] = torch.add(state["x"], move, alpha=share, out=Bucket(state["x"], self._layout).new())
            state["number"] = torch.tensor(taken + stale + 1)
            self._done = StreamMark(move.device)
            return taken + stale + 1, state["x"]

    def _serve(self) -> Program[None]:
        """Answer ranks as they call, until all others have sent a shutdown message."""
        callers = {*range(self._loop.ranks.size)} - {self._loop.ranks.rank}
        while callers:
            caller, message = yield from receive_first(WORD)
            if (taken := number_in(message)) == GOODBYE:
                callers.discard(caller)
                continue
            length = self._layout.numel * self._layout.dtype.itemsize
            yield from answer(caller, length, partial(self._add_wire, taken=taken))

    def _add_wire(self, wire: Tensor, taken: int) -> tuple[int, Tensor]:
        return self.add(take(wire, self._layout.dtype, self._layout.numel)[0], taken)


def number_of(state: State, which: str) -> int:
    """Return how many steps a model contains: the server's ("number"), or the one that a rank took ("taken")."""
    return int(state[which]) if which in state else 0
