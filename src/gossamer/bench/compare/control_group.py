"""What the ranks of a trial say to one another between turns. Nothing is pickled."""

import json
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from statistics import fmean
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from gossamer.bench.lab import name_rank, name_ranks
from gossamer.core.errors import GossamerError, PeerError, plainly
from gossamer.fabrics.reach import why_silent
from gossamer.fabrics.shared_store import SharedStore
from gossamer.fabrics.store import default_store

MARGIN = 10.0  # seconds beyond the deadline: those who wait for a rank that failed give up first, and then join it here
SHORTEST = 3.0  # of it what they need to find out who is missing; the rest is for ranks that are late, but not too late
PAUSE = 1.0  # seconds between two looks at whether others have failed
PATIENCE = 1.0  # seconds to ask who has not come
LONGEST = 64 * 2**20  # bytes of a text


class CalledOffError(PeerError):
    """Another rank has failed, and will say why."""


class ControlGroup:
    """A group of its own: a contender that fails in the middle of a collective leaves this one in step."""

    def __init__(self, deadline: float, per_host: int = 1) -> None:
        self.per_host = per_host  # ranks that share a host, which errors name then
        self.deadline, self.margin = deadline, min(MARGIN, SHORTEST + deadline)
        self.group = new_group(deadline + self.margin)
        store = default_store()
        self._store = SharedStore(store, dist.get_rank(), dist.get_world_size()).under(
            f"control/{self.group.group_name}"
        )
        self._meetings = 0
        self._ask_at = 0.0

    def all_fine(self, fine: bool, hurry: bool = False) -> bool:
        """Did it work on every rank? In a `hurry`, whoever waited for somebody in vain does not wait as long again."""
        flag = torch.tensor([int(not fine)])
        with self._meeting():
            patience = self.margin if hurry else self.deadline + self.margin
            work = dist.all_reduce(flag, group=self.group, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=patience))
        return not int(flag)

    def call_off(self) -> None:
        """Let those who are still at it know that what all ranks do has failed here."""
        with suppress(RuntimeError):
            self._store.raise_flag(f"off/{self._meetings}", str(self._store.rank))

    def expect_all(self) -> None:
        """In the middle of what all ranks do: an error if it has failed elsewhere. ScriptOptions often, answered once a second."""
        if monotonic() < self._ask_at:
            return
        self._ask_at = monotonic() + PAUSE
        with self._explained():
            called_off = self._store.flag_is_up(f"off/{self._meetings}")
        if called_off:
            raise CalledOffError("it has failed on another rank")

    def texts(self, mine: str) -> list[str]:
        """Every rank's text. Their lengths are agreed on first, since they may depend on what a rank has seen."""
        raw = bytearray(mine.encode())
        lengths = [int(n) for n in self._gather(torch.tensor([len(raw)]))]
        longest = max(lengths)
        if longest > LONGEST:
            who = self.named(lengths.index(longest))
            raise PeerError(f"{who} announces a text of {longest} bytes, more than any can be")
        padded = torch.frombuffer(raw + bytes(1 + longest - len(raw)), dtype=torch.uint8)
        rows = self._gather(padded)
        return [row[:n].numpy().tobytes().decode(errors="replace") for row, n in zip(rows, lengths, strict=True)]

    def means(self, mine: Mapping[str, float]) -> dict[str, float]:
        """The mean of each number over the ranks that have it; they need not have the same ones."""
        everyone: list[dict[str, float]] = [json.loads(t) for t in self.texts(json.dumps(dict(mine)))]
        names = dict.fromkeys(name for each in everyone for name in each)
        return {name: fmean(each[name] for each in everyone if name in each) for name in names}

    def first_says(self, yes: bool) -> bool:
        """Rank 0 decides: clocks differ by a hair between ranks, decisions must not."""
        flag = torch.tensor([int(yes)])
        with self._meeting():
            dist.broadcast(flag, 0, group=self.group)
        return bool(flag)

    def same(self, what: str, facts: dict[str, Any]) -> None:
        """Every rank raises the same error if any two differ."""
        everyone = [json.loads(t) for t in self.texts(json.dumps(facts))]
        for name, value in everyone[0].items():
            for rank, other in enumerate(everyone):
                if other[name] != value:
                    told = f"{name} is {_cut(value)} on {self.named(0)} and {_cut(other[name])} on {self.named(rank)}"
                    raise PeerError(f"{what}: {told}")

    def named(self, rank: int) -> str:
        return name_rank(rank, self.per_host)

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor; all are of one size."""
        rows = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        with self._meeting():
            dist.all_gather(rows, mine, group=self.group)
        return rows

    @contextmanager
    def _meeting(self) -> Generator[None, None, None]:
        """All ranks do the same in here; an error says who has not come to it."""
        self._meetings += 1
        with self._explained():
            self._store.raise_flag(str(self._store.rank), str(self._meetings))
            yield

    @contextmanager
    def _explained(self) -> Generator[None, None, None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerError(f"{self._who_is_missing()} ({plainly(error)})") from None

    def _who_is_missing(self) -> str:
        came = dict[int, bool]()

        def ask() -> None:
            with suppress(RuntimeError):
                for rank in range(self._store.size):
                    came[rank] = self._store.flag_is_up(str(rank)) and self._at(rank) >= self._meetings

        # The store's host may itself be gone, in a way that makes its clients wait; nobody may wait for them.
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(PATIENCE)
        if len(came) < self._store.size:
            return f"the store does not answer: {why_silent(self._store.raw)}"
        missing = [rank for rank, here in came.items() if not here]
        if not missing:
            return "all ranks have come, and one does not go on: it may have died, or be frozen, in this very moment"
        return f"no word from {name_ranks(missing, self.per_host)}: dead, frozen, cut off, or late"

    def _at(self, rank: int) -> int:
        return int(self._store.raw.get(str(rank)))


def _cut(value: Any, most: int = 300) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def new_group(timeout: float) -> dist.ProcessGroup:
    """A group of all ranks; all make it together."""
    try:
        made = dist.new_group(timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        raise PeerError(f"other ranks are gone: {plainly(error)}") from None
    assert isinstance(made, dist.ProcessGroup)
    return made


def attempt(control: ControlGroup, do: Callable[[], None]) -> str:
    """Do something that all ranks do; if it fails on any, it has failed on all. Returns why, or nothing."""
    fine, mine, missed, began = False, "", False, monotonic()
    try:
        do()
        fine = True
    except CalledOffError:
        pass
    except Exception as error:
        mine = str(error) if isinstance(error, GossamerError) else f"{type(error).__name__}: {plainly(error)}"
        missed = isinstance(error, PeerError)
        control.call_off()
    try:
        if control.all_fine(fine, hurry=bool(mine) and monotonic() - began >= control.deadline):
            return ""
        return _name_cause(control, control.texts(json.dumps([missed, mine[:1500]])))
    except PeerError as error:
        raise PeerError(mine or str(error)) from None  # what happened first says more


def _name_cause(control: ControlGroup, told: Sequence[str]) -> str:
    """What a rank did wrong itself says more than that others missed it."""
    found = [
        (missed, f"{control.named(rank)}: {why}") for rank, (missed, why) in enumerate(map(json.loads, told)) if why
    ]
    return min(found, key=lambda each: each[0])[1] if found else "failed, and no rank says why"
