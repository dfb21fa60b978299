"""Backup workers: the step ends when enough gradients are in, not when the last one is."""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from gossamer.codecs import FP32
from gossamer.core.block import Block, State
from gossamer.core.contracts import Exchange, Quorum, Seat, Settled
from gossamer.core.parts import part, require
from gossamer.core.verbs import Program, all_reduce, claim, closed
from gossamer.exchanges.allreduce import AllReduced


@final
@part("first")
class First(Quorum):
    """Average the first N of N + b gradients; the b latest are dropped, and their workers are told.

    A rank whose gradient is ready claims a ticket for the step. The N-th ticket closes it; then all ranks enter one
    exchange of flag g, flag = 1 for the first N. A late rank takes part with zeros while it still computes, and applies
    every update it missed in order, so all replicas stay bit-equal. `backups=0` is synchronous SGD. N must be two at
    least: of one gradient a step there is no mean, and a rank alone would train as well.

    It hides slow computing, not a dead process or a slow link: those are errors within the deadline.

    Use: where machines are slow now and then, each in its turn.

    Not for: machines that are all alike, nor one that is always last: its data is never learned.

    Wire: that of `over` (late ranks send zeros), one store round trip, and 8 bytes a parameter group.

    >>> First(backups=1)
    first()

    Paper: Chen, Pan, Monga, Bengio, Jozefowicz, Revisiting Distributed Synchronous SGD, 2016.
    """

    backups: int = 1
    over: Exchange = AllReduced(FP32())

    def __post_init__(self) -> None:
        require(self.backups >= 0, f"first: backups must be 0 or more, got {self.backups}")
        require(
            isinstance(self.over, Exchange),  # pyright: ignore[reportUnnecessaryIsInstance]
            f"first(over={self.over}): over must be an exchange that all ranks take part in, such as allreduce(fp32())",
        )
        require(
            not self.over.needs_feedback,
            f"first(over={self.over}): a dropped gradient's residual would be lost silently; "
            "use an exchange that needs no memory, such as scatter(qsgd())",
        )

    def check(self, size: int) -> None:
        wanted = size - self.backups
        ranks = f"{size} rank{'s' * (size > 1)} leave{'s' * (size == 1)}"
        what = "nobody to wait for" if wanted < 1 else "one gradient a step, and the others are computed for nothing"
        require(
            wanted > 1 or (wanted == 1 and self.backups == 0),
            f"first(backups={self.backups}): {ranks} {what}; use at least {self.backups + 2} ranks, or {self.over}",
        )

    def claim(self, seat: Seat) -> Program[int]:
        return (yield from claim(f"step/{seat.step}"))

    def settle(
        self,
        like: Block,
        state: State,
        seat: Seat,
        offer: Callable[[], tuple[Tensor, Tensor] | None],
        facts: int,
    ) -> Program[Settled]:
        wanted = seat.size - self.backups
        accepted = yield from closed(f"step/{seat.step}", wanted)
        mine = offer() if seat.rank in accepted else None
        nothing = torch.zeros(facts, dtype=torch.float64, device=like.flat.device)
        flat, numbers = mine if mine is not None else (like.new().zero_(), nothing)
        echo = yield from self.over.average(like.like(flat), state, seat)
        # The fastest rank speaks for all: one learning rate for one update, although a late rank's scheduler lags.
        agreed = yield from all_reduce(numbers.clone() if seat.rank == accepted[0] else nothing)
        mean = echo.mean if wanted == seat.size else echo.mean.mul_(seat.size / wanted)
        return Settled(mean, accepted, agreed, echo.add_sent if mine is not None else None)
