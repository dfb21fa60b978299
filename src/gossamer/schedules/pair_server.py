"""Meetings of two ranks: what each of them says, and the desk of a rank that answers beside its training.

Who may touch what: parameters are the training thread's alone. A desk keeps `base`, the parameters as they were after the
last step, and `owed` in the checkpoint's state, what is to be added to them; the lane reads both and adds to the latter,
the training thread renews both after a step. The lock is held for that, and no longer.
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

WORD = 8  # bytes: the number of the block that is asked about
GOODBYE = -1


def ask(partner: int, index: int, mine: Bucket) -> Program[Tensor]:
    """Send a model's block, and get what moves it half the way to the partner's, who has moved as much by then."""
    wire = pack(mine.flat)
    yield from send(partner, _word(index, mine.flat.device))
    yield from send(partner, wire, [(partner, wire.numel())])
    return half_way(mine, (yield from receive(partner, wire.numel())))


def answer(caller: int, length: int, meet: Callable[[Tensor], Bucket]) -> Program[None]:
    """The other end of it: `meet` is given the caller's block, and moves before it says what it was."""
    theirs = yield from receive(caller, length)
    yield from send(caller, pack(meet(theirs).flat))


def half_way(mine: Bucket, wire: Tensor) -> Tensor:
    """What moves a block to the middle. The moves of two that meet add up to nothing."""
    theirs, _ = take(wire, mine.flat.dtype, mine.numel)
    return torch.sub(theirs, mine.flat, out=mine.new()).mul_(0.5)


def length_of(block: Bucket) -> int:
    """Of its message, in bytes."""
    return block.numel * block.flat.element_size()


def send_shutdown(partners: Iterable[int], device: torch.device) -> Program[None]:
    """Tell those who answer that this rank asks no more."""
    for partner in sorted(partners):
        yield from send(partner, _word(GOODBYE, device))


def _word(index: int, device: torch.device) -> Tensor:
    return copied_to(torch.tensor([index]), device).view(torch.uint8)


def model_with_residual(model: Bucket, state: State) -> Bucket:
    """A block's model, with what it is owed."""
    return model.like(torch.add(model.flat, state["owed"], out=model.new())) if "owed" in state else model


def add_residual(state: State, move: Tensor, model: Bucket) -> None:
    """Add to what a block is owed."""
    state["owed"] = torch.add(state["owed"], move, out=model.new()) if "owed" in state else move


class PairServer:
    """One rank's side of its meetings."""

    def __init__(self, loop: Loop, near: Iterable[int], serves: bool, lane: str) -> None:
        self.near, self.serves = frozenset(near), serves
        self.asked: int | None = None  # the step of the last question; None of one that a checkpoint brought
        self._loop, self._lane = loop, lane
        self._lock = Lock()
        self._base = list[Bucket]()
        self._done = list[StreamMark]()  # by block: what the device was given about it last
        self._handle: Handle[Any] | None = None

    def open(self) -> Program[None]:
        """Begin to answer, where this is the side that does."""
        if not self.serves or self._handle is not None:
            return
        self._base = self._loop.blocks()
        self._done = [StreamMark(base.flat.device) for base in self._base]
        self._handle = yield from start(self._serve(), "answers", lane=self._lane)

    def models(self) -> list[Tensor]:
        """The blocks with all that they are owed; between steps."""
        with self._lock:
            for moment in self._done:
                moment.precedes()
            record_stream_use(tensor for state in self._loop.mixing for tensor in state.values())
            return [model_with_residual(block, state).flat for block, state in self._coming()]

    def take(self) -> Program[None]:
        """After the optimizer's step: add to the model what came while it was computed."""
        assert self._handle is not None
        if self._handle.done():  # all who may ask have left, or it has failed, which is raised here
            yield from join(self._handle)
        with self._lock:
            for i, moment in enumerate(self._done):
                moment.precedes()
                self._base[i] = self._move(i)
                self._done[i] = StreamMark(self._base[i].flat.device)

    def land(self, arrived: Sequence[Sequence[Tensor]]) -> None:
        """On the side that asks: add what the answers came to."""
        for i, wires in enumerate(arrived):
            self._move(i, wires)

    def _coming(self) -> Iterator[tuple[Bucket, State]]:
        """The blocks, and what they are owed with the answers that have come and have not landed."""
        for block, kept, wires in zip(self._loop.blocks(), self._loop.mixing, self._loop.arrived(), strict=True):
            state = dict(kept)
            for wire in wires:
                add_residual(state, wire.view(block.flat.dtype), block)
            yield block, state

    def _move(self, index: int, wires: Sequence[Tensor] = ()) -> Bucket:
        """Add to a block's parameters what they are owed; what rounding takes of it stays owed."""
        one = self._loop.part([index])
        (model,), (state,) = one.blocks(), one.mixing
        for wire in wires:
            add_residual(state, wire.view(model.flat.dtype), model)
        if "owed" not in state:
            return model
        owed = state.pop("owed")
        record_stream_use([owed])  # a lane made it
        model.flat.add_(owed)
        (taken,) = one.write([model.flat])
        if taken is not model.flat:
            state["owed"] = torch.sub(model.flat, taken, out=model.new())
        return model.like(taken)

    # -- on the lane -------------------------------------------------------------------------------------------------

    def _serve(self) -> Program[None]:
        """Answer whoever calls first, until all neighbours have said goodbye."""
        callers = set(self.near)
        while callers:
            caller, word = yield from receive_first(WORD)
            index = int(word.clone().view(torch.int64))
            if index == GOODBYE:
                callers.discard(caller)
                continue
            if not (caller in callers and 0 <= index < len(self._base)):
                raise WireError(
                    f"rank {caller} asks about block {index} of {len(self._base)}, or has left: not what a peer sends"
                )
            yield from answer(caller, length_of(self._base[index]), partial(self._meet, index))

    def _meet(self, index: int, wire: Tensor) -> Bucket:
        """Move to the middle; returns where this rank was. Nobody writes to what is given."""
        with self._lock:
            self._done[index].precedes()
            base, state = self._base[index], self._loop.mixing[index]
            record_stream_use([base.flat, *state.values()])
            mine = model_with_residual(base, state)
            add_residual(state, half_way(mine, wire), base)
            self._done[index] = StreamMark(wire.device)
        return mine
