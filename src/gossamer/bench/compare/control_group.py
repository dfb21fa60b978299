"""Agreement between the ranks of a comparison, between two slices of training. Nothing is pickled."""

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
from gossamer.core.text import cut
from gossamer.fabrics.liveness.store import SharedStore, default_store, why_silent

MARGIN = 10.0  # seconds beyond the deadline: ranks that wait for a failed rank give up first, and then join it here
SHORTEST = 3.0  # the part of it needed to find out which rank is missing; the rest is for ranks that are a little late
PAUSE = 1.0  # seconds between two checks whether another rank has failed
PATIENCE = 1.0  # seconds to ask the store which ranks are missing
LONGEST = 64 * 2**20  # bytes of a text
LONGEST_VALUE = 300  # characters of a value that an error shows


class CalledOffError(PeerError):
    """Another rank has failed; that rank reports the reason."""


class ControlGroup:
    """A process group for control messages only: a run that fails inside a collective does not disturb this group."""

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
        """True if every rank passes `fine=True`. With `hurry`, a rank that has already waited a deadline waits less."""
        flag = torch.tensor([int(not fine)])
        with self._meeting():
            patience = self.margin if hurry else self.deadline + self.margin
            work = dist.all_reduce(flag, group=self.group, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=patience))
        return not int(flag)

    def call_off(self) -> None:
        """Tell the other ranks that the current common action has failed on this rank."""
        with suppress(RuntimeError):
            self._store.raise_flag(f"off/{self._meetings}", str(self._store.rank))

    def expect_all(self) -> None:
        """Raise CalledOffError if the current common action has failed on another rank. Checks the store once a second."""
        if monotonic() < self._ask_at:
            return
        self._ask_at = monotonic() + PAUSE
        with self._explained():
            called_off = self._store.flag_is_up(f"off/{self._meetings}")
        if called_off:
            raise CalledOffError("it has failed on another rank")

    def texts(self, mine: str) -> list[str]:
        """Gather one text from every rank; lengths may differ."""
        raw = bytearray(mine.encode())
        lengths = [int(n) for n in self._gather(torch.tensor([len(raw)]))]
        longest = max(lengths)
        if longest > LONGEST:
            who = self.named(lengths.index(longest))
            raise PeerError(f"{who} announced a text of {longest} bytes, and at most {LONGEST} are allowed")
        padded = torch.frombuffer(raw + bytes(1 + longest - len(raw)), dtype=torch.uint8)
        rows = self._gather(padded)
        return [row[:n].numpy().tobytes().decode(errors="replace") for row, n in zip(rows, lengths, strict=True)]

    def means(self, mine: Mapping[str, float]) -> dict[str, float]:
        """Mean of each number over the ranks that have it; ranks may have different names."""
        everyone: list[dict[str, float]] = [json.loads(t) for t in self.texts(json.dumps(dict(mine)))]
        names = dict.fromkeys(name for each in everyone for name in each)
        return {name: fmean(each[name] for each in everyone if name in each) for name in names}

    def first_says(self, yes: bool) -> bool:
        """Broadcast rank 0's decision, since decisions that depend on clocks could differ between ranks."""
        flag = torch.tensor([int(yes)])
        with self._meeting():
            dist.broadcast(flag, 0, group=self.group)
        return bool(flag)

    def same(self, what: str, facts: dict[str, Any]) -> None:
        """Raise the same error on every rank if any two ranks differ in `facts`."""
        everyone = [json.loads(t) for t in self.texts(json.dumps(facts))]
        for name, value in everyone[0].items():
            for rank, other in enumerate(everyone):
                if other[name] != value:
                    mine, theirs = (cut(repr(each), LONGEST_VALUE) for each in (value, other[name]))
                    raise PeerError(f"{what}: {name} is {mine} on {self.named(0)} and {theirs} on {self.named(rank)}")

    def named(self, rank: int) -> str:
        return name_rank(rank, self.per_host)

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Gather one tensor from every rank; all have one size."""
        rows = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        with self._meeting():
            dist.all_gather(rows, mine, group=self.group)
        return rows

    @contextmanager
    def _meeting(self) -> Generator[None, None, None]:
        """Context for one collective: an error names the ranks that did not join it."""
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

        # The store's host may be gone in a way that blocks its clients, so a thread asks it.
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(PATIENCE)
        if len(came) < self._store.size:
            return f"the store does not answer: {why_silent(self._store.raw)}"
        missing = [rank for rank, here in came.items() if not here]
        if not missing:
            return "all ranks joined, and then one stopped answering: it died or froze just now"
        return f"no message from {name_ranks(missing, self.per_host)}: dead, frozen, cut off, or late"

    def _at(self, rank: int) -> int:
        return int(self._store.raw.get(str(rank)))


def meet(timeout: float) -> None:
    """Join the ranks that a launcher has started, with a group of gloo."""
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        raise PeerError(f"the ranks cannot find each other: {plainly(error)}") from None


def new_group(timeout: float) -> dist.ProcessGroup:
    """Create a group of all ranks; every rank must call this."""
    try:
        made = dist.new_group(timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        raise PeerError(f"other ranks are gone: {plainly(error)}") from None
    assert isinstance(made, dist.ProcessGroup)
    return made


def attempt(control: ControlGroup, do: Callable[[], None]) -> str:
    """Run an action on all ranks; return why it failed on any rank, or an empty string."""
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
        raise PeerError(mine or str(error)) from None  # the first error says more


def _name_cause(control: ControlGroup, told: Sequence[str]) -> str:
    """The rank's own error is preferred to errors of ranks that waited for it."""
    found = [
        (missed, f"{control.named(rank)}: {why}") for rank, (missed, why) in enumerate(map(json.loads, told)) if why
    ]
    return min(found, key=lambda each: each[0])[1] if found else "failed, and no rank says why"
