"""Meetings of two ranks: what each of them says, and the desk of a rank that answers beside its training.

Who may touch what: parameters are the training thread's alone. A desk keeps `base`, the parameters as they were after the
last step, and `owed` in the checkpoint's state, what is to be added to them; the lane reads both and adds to the latter,
the training thread renews both after a step. The lock is held for that, and no longer.
"""

from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from gossamer.core.block import State
from gossamer.core.errors import WireError
from gossamer.core.moments import Moment, sent, used_here
from gossamer.core.schedule import Loop
from gossamer.core.verbs import Handle, Program, join, receive, receive_first, send, start
from gossamer.core.wire import pack, take

WORD = 8  # bytes: the number of the block that is asked about
GOODBYE = -1


def ask(partner: int, index: int, mine: Tensor) -> Program[Tensor]:
    """Send a model's block, and get what moves it half the way to the partner's."""
    yield from send(partner, _word(index, mine.device))
    return (yield from _swap(partner, mine))


def answer(caller: int, mine: Tensor) -> Program[Tensor]:
    """The other end of it: the two moves add up to nothing."""
    return (yield from _swap(caller, mine))


def goodbye(partners: Iterable[int], device: torch.device) -> Program[None]:
    """Tell those who answer that this rank asks no more."""
    for partner in sorted(partners):
        yield from send(partner, _word(GOODBYE, device))


def _swap(other: int, mine: Tensor) -> Program[Tensor]:
    """Both ways at once: neither side's message depends on the other's."""
    wire = pack(mine)
    yield from send(other, wire, [(other, wire.numel())])
    theirs, _ = take((yield from receive(other, wire.numel())), mine.dtype, mine.numel())
    return (theirs - mine).mul_(0.5)


def _word(index: int, device: torch.device) -> Tensor:
    return sent(torch.tensor([index]), device).view(torch.uint8)


def whole(model: Tensor, state: State) -> Tensor:
    """A block's model, with what it is owed."""
    return model + state["owed"] if "owed" in state else model


class Desk:
    """One rank's side of its meetings."""

    def __init__(self, loop: Loop, near: Iterable[int], serves: bool, lane: str) -> None:
        self.near, self.serves = frozenset(near), serves
        self._loop, self._lane = loop, lane
        self._lock = Lock()
        self._base = list[Tensor]()
        self._done = list[Moment]()  # by block: what the device was given about it last
        self._handle: Handle[Any] | None = None

    def open(self) -> Program[None]:
        """Begin to answer, where this is the side that does."""
        if not self.serves or self._handle is not None:
            return
        self._base = self._loop.parameters()
        self._done = [Moment(base.device) for base in self._base]
        self._handle = yield from start(self._serve(), "answers", lane=self._lane)

    def models(self) -> list[Tensor]:
        """The blocks with all that they are owed; between steps."""
        with self._lock:
            for moment in self._done:
                moment.precedes()
            used_here(tensor for state in self._loop.mixing for tensor in state.values())
            return [whole(x, state) for x, state in zip(self._loop.parameters(), self._coming(), strict=True)]

    def take(self) -> Program[None]:
        """After the optimizer's step: add to the model what came while it was computed."""
        assert self._handle is not None
        if self._handle.done():  # all who may ask have left, or it has failed, which is raised here
            yield from join(self._handle)
        with self._lock:
            for i, moment in enumerate(self._done):
                moment.precedes()
                self._base[i] = self._move(i)
                self._done[i] = Moment(self._base[i].device)

    def land(self, arrived: Sequence[Sequence[Tensor]]) -> None:
        """On the side that asks: add what the answers came to."""
        for i, (state, wires) in enumerate(zip(self._loop.mixing, arrived, strict=True)):
            owe(state, wires, self._loop.places[i].layout.dtype)
            self._move(i)

    def _coming(self) -> list[State]:
        """What each block is owed, with the answers that have come and have not landed."""
        out = list[State]()
        for place, kept, wires in zip(self._loop.places, self._loop.mixing, self._loop.arrived(), strict=True):
            state = dict(kept)
            owe(state, wires, place.layout.dtype)
            out.append(state)
        return out

    def _move(self, index: int) -> Tensor:
        """Add to a block's parameters what they are owed; what rounding takes of it stays owed."""
        one, (state,) = self._loop.part([index]), self._loop.part([index]).mixing
        (model,) = one.parameters()
        if "owed" not in state:
            return model
        owed = state.pop("owed")
        used_here([owed])  # a lane made it
        model += owed
        (taken,) = one.write([model])
        if taken is not model:
            state["owed"] = model - taken
        return taken

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
            mine = self._model_of(index)
            self._owe(index, (yield from answer(caller, mine)))

    def _model_of(self, index: int) -> Tensor:
        """A block as it is by now; nobody writes to what is given."""
        with self._lock:
            self._done[index].precedes()
            state = self._loop.mixing[index]
            used_here([self._base[index], *state.values()])
            return whole(self._base[index], state)

    def _owe(self, index: int, move: Tensor) -> None:
        with self._lock:
            self._done[index].precedes()
            state = self._loop.mixing[index]
            used_here(state.values())
            state["owed"] = state["owed"] + move if "owed" in state else move
            self._done[index] = Moment(move.device)


def owe(state: State, wires: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Add moves to what a block is owed."""
    for wire in wires:
        move = wire.view(dtype)
        state["owed"] = state["owed"] + move if "owed" in state else move
