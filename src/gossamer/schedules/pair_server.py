"""Pairwise averages: the messages of two ranks, and the server of a rank that answers beside its training.

Which thread writes what: only the training thread writes parameters. The server keeps `base`, the parameters after the last
step, and `owed` in the checkpoint's state, what is still to be added to them. The comm thread reads both and adds to `owed`; the
training thread replaces both after a step. Both do so under a lock, held for no other work.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.errors import WireError
from gossamer.core.loop import Loop
from gossamer.core.stream_events import StreamMark, copied_to, record_stream_use
from gossamer.core.verbs import Handle, Program, join, receive, receive_first, send, start
from gossamer.core.wire import pack, take

WORD = 8  # bytes: the index of the requested bucket
GOODBYE = -1


def ask(partner: int, index: int, mine: Bucket) -> Program[Tensor]:
    """Send a bucket of the model; returns the move to the middle between it and the partner's bucket."""
    wire = pack(mine.flat)
    yield from send(partner, word(index, mine.flat.device))
    yield from send(partner, wire, [(partner, wire.numel())])
    return half_way(mine, (yield from receive(partner, wire.numel())))


def answer(caller: int, length: int, meet: Callable[[Tensor], Bucket]) -> Program[None]:
    """Answer `ask`: receive the caller's bucket, call `meet` with it, send back the bucket that it returns."""
    theirs = yield from receive(caller, length)
    yield from send(caller, pack(meet(theirs).flat))


def half_way(mine: Bucket, wire: Tensor) -> Tensor:
    """Return the move of a bucket to the middle of two models. The moves of both ranks add up to 0."""
    theirs, _ = take(wire, mine.flat.dtype, mine.numel)
    return torch.sub(theirs, mine.flat, out=mine.new()).mul_(0.5)


def length_of(block: Bucket) -> int:
    """Return the length of a bucket's message in bytes."""
    return block.numel * block.flat.element_size()


def send_shutdown(partners: Iterable[int], device: torch.device) -> Program[None]:
    """Tell each partner that this rank sends no more requests."""
    for partner in sorted(partners):
        yield from send(partner, word(GOODBYE, device))


def word(index: int, device: torch.device) -> Tensor:
    return copied_to(torch.tensor([index]), device).view(torch.uint8)


def model_with_residual(model: Bucket, state: State) -> Bucket:
    """Return a bucket of the model plus its residual (`owed`)."""
    return model.like(torch.add(model.flat, state["owed"], out=model.new())) if "owed" in state else model


def add_residual(state: State, move: Tensor, model: Bucket) -> None:
    """Add a move to a bucket's residual (`owed`)."""
    state["owed"] = torch.add(state["owed"], move, out=model.new()) if "owed" in state else move


class PairServer:
    """One rank's side of pairwise averages: asks its neighbours, or answers them on a comm thread."""

    def __init__(self, loop: Loop, near: Iterable[int], serves: bool, lane: str) -> None:
        self.near, self.serves = frozenset(near), serves
        self.asked: int | None = None  # step of the last request; None if it came from a checkpoint
        self._loop, self._lane = loop, lane
        self._lock = Lock()
        self._base = list[Bucket]()
        self._done = list[StreamMark]()  # by bucket: mark after its last device operation
        self._handle: Handle[Any] | None = None

    def open(self) -> Program[None]:
        """Start to answer requests, if this rank is on the side that answers."""
        if not self.serves or self._handle is not None:
            return
        self._base = self._loop.blocks()
        self._done = [StreamMark(base.flat.device) for base in self._base]
        self._handle = yield from start(self._serve(), "answers", lane=self._lane)

    def models(self) -> list[Tensor]:
        """Return the buckets plus their residuals, between steps."""
        with self._lock:
            for mark in self._done:
                mark.precedes()
            record_stream_use(tensor for state in self._loop.mixing for tensor in state.values())
            return [model_with_residual(block, state).flat for block, state in self._coming()]

    def take(self) -> Program[None]:
        """After the optimizer's step, add the moves that arrived meanwhile to the model."""
        assert self._handle is not None
        if self._handle.done():  # all callers have left, or it has failed, which is raised here
            yield from join(self._handle)
        with self._lock:
            for i, mark in enumerate(self._done):
                mark.precedes()
                self._base[i] = self._move(i)
                self._done[i] = StreamMark(self._base[i].flat.device)

    def land(self, arrived: Sequence[Sequence[Tensor]]) -> None:
        """On the side that asks, add the moves of the answers to the model."""
        for i, wires in enumerate(arrived):
            self._move(i, wires)

    def _coming(self) -> Iterator[tuple[Bucket, State]]:
        """Yield the buckets with their state, including answers that have arrived but are not added yet."""
        for block, kept, wires in zip(
            self._loop.blocks(), self._loop.mixing, self._loop.messages.arrived(), strict=True
        ):
            state = dict(kept)
            for wire in wires:
                add_residual(state, wire.view(block.flat.dtype), block)
            yield block, state

    def _move(self, index: int, wires: Sequence[Tensor] = ()) -> Bucket:
        """Add a bucket's residual to its parameters; what rounding removes stays in the residual."""
        one = self._loop.part([index])
        (model,), (state,) = one.blocks(), one.mixing
        for wire in wires:
            add_residual(state, wire.view(model.flat.dtype), model)
        if "owed" not in state:
            return model
        owed = state.pop("owed")
        record_stream_use([owed])  # a comm thread made it
        model.flat.add_(owed)
        (taken,) = one.write([model.flat])
        if taken is not model.flat:
            state["owed"] = torch.sub(model.flat, taken, out=model.new())
        return model.like(taken)

    # -- on the comm thread ------------------------------------------------------------------------------------------

    def _serve(self) -> Program[None]:
        """Answer requests as they arrive, until all neighbours have sent a shutdown message."""
        callers = set(self.near)
        while callers:
            caller, message = yield from receive_first(WORD)
            index = int(message.clone().view(torch.int64))
            if index == GOODBYE:
                callers.discard(caller)
                continue
            if not (caller in callers and 0 <= index < len(self._base)):
                raise WireError(
                    f"rank {caller} sent a request for bucket {index} of {len(self._base)}, which is no valid request, or came after its shutdown; "
                    "check that all ranks run the same version and recipe"
                )
            yield from answer(caller, length_of(self._base[index]), partial(self._meet, index))

    def _meet(self, index: int, wire: Tensor) -> Bucket:
        """Move a bucket to the middle; returns its value from before, which must not be written to."""
        with self._lock:
            self._done[index].precedes()
            base, state = self._base[index], self._loop.mixing[index]
            record_stream_use([base.flat, *state.values()])
            mine = model_with_residual(base, state)
            add_residual(state, half_way(mine, wire), base)
            self._done[index] = StreamMark(wire.device)
        return mine
