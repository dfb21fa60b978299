"""Heartbeats: every rank posts its status, and a rank that waits long reads the statuses of the others."""

import json
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from gossamer.fabrics.liveness.store import SharedStore, may_wait

Patience = Literal["alive", "work"]
"""What the deadline limits: only missing heartbeats and a standstill of all ranks ("alive"), or every wait ("work")."""

OFTEN = 0.5  # seconds between two heartbeats; each is one small request
_SOON = 1.0  # seconds of a wait before the other ranks' statuses are read: steps on a fast network read none


class RankStatus(NamedTuple):
    """The last status of a rank: the number of its heartbeats, and what it does."""

    beats: int
    state: str  # "works", "waits" (long, for others) or "left"
    done: Mapping[str, int] = {}  # of a rank that has left: number of collectives of each comm thread
    moves: int = 0  # requests that crossed the network so far

    def write(self) -> str:
        return json.dumps(self)

    @staticmethod
    def of(fields: Any) -> "RankStatus | None":
        """A status as it was written; None for anything else."""
        beats, state, done, moves = fields
        fits = isinstance(beats, int) and isinstance(moves, int) and state in ("works", "waits", "left")
        fits = fits and isinstance(done, dict) and all(isinstance(n, int) for n in done.values())
        return RankStatus(beats, state, done, moves) if fits else None


def rank_statuses(store: SharedStore) -> dict[int, RankStatus]:
    """The last status of each other rank that has posted one."""
    if store.size == 1:
        return {}
    keys = {r: f"pulse/{r}" for r in store.others}
    complete = store.are_there(list(keys.values()))
    there = [r for r, key in keys.items() if complete or store.flag_is_up(key)]
    texts = store.read([keys[r] for r in there])
    return {r: store.parsed(keys[r], text, RankStatus.of) for r, text in zip(there, texts, strict=True)}


class Heartbeat:
    """A thread that posts this rank's status twice a second, and reads those of the others while this rank waits for them.

    A process that computes in torch or in Python goes on with its heartbeat; one that is stopped, swapped out or dead does
    not, nor one in native code that holds Python's lock all the time. Only this thread asks the store for statuses, since a
    store with a frozen host never answers.
    """

    def __init__(self, store: SharedStore, deadline: float, patience: Patience, vital: bool) -> None:
        self.store, self.deadline, self.patience = store, deadline, patience
        self.vital = vital  # True if the store ends only with one of these ranks, so that its loss is a failure
        self.often = min(OFTEN, deadline / 5)
        self.soon = min(_SOON, deadline / 4)
        self.heard = dict[int, tuple[RankStatus, float]]()  # by rank: the last status, and the time of its last change
        self.answered = 0.0  # time of the store's last answer
        self.broken = False  # True if a comm thread of some rank has failed
        self.lost: RuntimeError | None = None  # why the store cannot be reached any more
        self.moves = 0  # requests of this rank that crossed the network
        self.each_time: Callable[[], None] | None = None  # called in the thread after each heartbeat
        self._waits = list[Callable[[], bool]]()
        self._lock = threading.Lock()
        self._wake, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._live, name="gossamer-pulse", daemon=True)
        if store.size > 1:
            may_wait(self._thread, store.raw)
            self._thread.start()

    def close(self) -> bool:
        """Stop the heartbeat; False if the thread still waits for the store."""
        self._ended = True
        self._wake.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(0.5)
        return not self._thread.is_alive()

    def hurry(self) -> None:
        """Post the next heartbeat now."""
        self._wake.set()

    def answers(self) -> bool:
        """True if the store has answered within the deadline."""
        return self.lost is None and time.monotonic() - self.answered < self.deadline

    @contextmanager
    def monitor(self, asks: Callable[[], bool]) -> Generator["WaitMonitor"]:
        """Watch the other ranks during a long wait; `asks` is True while the task waits for the network, not for this rank."""
        with self._lock:
            if not self._waits:
                self.heard = {}
            self._waits.append(asks)
        self._wake.set()
        try:
            yield WaitMonitor(self, asks)
        finally:
            with self._lock:
                self._waits.remove(asks)

    def _live(self) -> None:
        beats = 0
        while not self._ended:
            beats += 1
            try:
                status = RankStatus(beats, "waits" if self._is_idle() else "works", moves=self.moves)
                self.store.raise_flag(f"pulse/{self.store.rank}", status.write())
                if self._waits:
                    self._look()
                if self.each_time is not None:
                    self.each_time()
            except RuntimeError as error:
                self.lost = error
                return
            self._wake.wait(self.often)
            self._wake.clear()

    def _is_idle(self) -> bool:
        waits = list(self._waits)
        return bool(waits) and all(asks() for asks in waits)

    def _look(self) -> None:
        before, found = self.heard, rank_statuses(self.store)
        self.broken = self.store.flag_is_up("broken")
        now = time.monotonic()
        self.answered = now
        self.heard = {r: (word, _changed(before.get(r), word, now)) for r, word in found.items()}


def _changed(before: tuple[RankStatus, float] | None, word: RankStatus, now: float) -> float:
    """Time of a status's last change; 0 at the first look, which cannot tell."""
    if before is None:
        return 0.0
    return before[1] if before[0] == word else now


class WaitMonitor:
    """One long wait, and the decision when to end it."""

    def __init__(self, pulse: Heartbeat, asks: Callable[[], bool]) -> None:
        self.pulse, self.deadline, self._asks = pulse, pulse.deadline, asks
        self.began = self._moved = time.monotonic() - pulse.soon
        self._moves = pulse.moves
        self.warned = False

    def verdict(self, doomed: Callable[[Mapping[int, RankStatus]], str]) -> str:
        """Why the wait must end; empty while it may go on. `doomed` gives reasons found in the other ranks' statuses."""
        now, pulse = time.monotonic(), self.pulse
        heard = pulse.heard
        if pulse.store.size == 1 or pulse.patience == "work" or (pulse.lost is not None and not pulse.vital):
            return f"not done after {self.deadline:g} seconds" if self.is_late() else ""
        if pulse.lost is not None or now - max(self.began, pulse.answered) >= self.deadline:
            return "the store does not answer"
        if pulse.broken:
            return "another rank has left this comm thread"
        statuses = {r: status for r, (status, _) in heard.items()}
        moves = pulse.moves + sum(status.moves for status in statuses.values())
        if moves != self._moves or not self._asks() or any(status.state == "works" for status in statuses.values()):
            self._moved, self._moves = now, moves
        if why := doomed(statuses):
            return why
        alive_at = {r: max(self.began, changed) for r, (_, changed) in heard.items()}
        left = {r for r, status in statuses.items() if status.state == "left"}
        others = [r for r in pulse.store.others if r not in left]
        if silent := [r for r in others if now - alive_at.get(r, self.began) >= self.deadline]:
            return f"no heartbeat from {ranks(silent)} for {self.deadline:g} seconds"
        return f"no rank has made progress for {self.deadline:g} seconds" if now - self._moved >= self.deadline else ""

    def is_late(self) -> bool:
        return time.monotonic() - self.began >= self.deadline

    def working(self) -> list[int]:
        """Ranks that work elsewhere and have posted a status recently."""
        late = time.monotonic() - self.deadline / 2
        return [r for r, (word, changed) in self.pulse.heard.items() if word.state == "works" and changed > late]


def ranks(numbers: list[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"
