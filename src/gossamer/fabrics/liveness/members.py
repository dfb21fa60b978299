"""Elastic members: the ranks that train together now, of which some may die and come back.

Every process writes a heartbeat to a store that outlives all ranks. When a rank is lost or joins, the rank that notices it
proposes the next generation: the list of members from now on. The first proposal wins (compare and set). All members read it
and connect again under its number.
"""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from gossamer.core.errors import PeerError
from gossamer.fabrics.liveness.heartbeat import ranks as named
from gossamer.fabrics.liveness.store import SharedStore, may_wait, why_silent

BEAT = 0.1  # seconds between two heartbeats
LOOK = 1.0  # seconds in which every living rank has written a heartbeat
FUTILE = 3  # regroups a minute with the same members; after that, the failure is not a lost rank, and is raised
LEFT = "left"


class Generation(NamedTuple):
    """The members from one regroup to the next, and the incarnation of each (how often its process has started).

    `began` is the number of the generation in which training started.
    """

    number: int
    began: int
    ranks: tuple[int, ...]
    lives: tuple[int, ...]

    @property
    def living(self) -> dict[int, int]:
        return dict(zip(self.ranks, self.lives))

    @staticmethod
    def read(store: SharedStore, key: str) -> "Generation":
        (text,) = store.read([key])
        try:
            fields: Any = json.loads(text)
            number, began, ranks, lives = fields
            fits = all(isinstance(n, int) for n in (number, began, *ranks, *lives)) and len(ranks) == len(lives) > 0
            fits = fits and list(ranks) == sorted(set(ranks)) and ranks[0] >= 0 and ranks[-1] < store.size
        except (ValueError, TypeError, RecursionError):
            raise store.malformed(key, text) from None
        if not fits:
            raise store.malformed(key, text)
        return Generation(number, began, tuple(ranks), tuple(lives))


class Members:
    """A set of processes of which some may die and come back; `gossamer.members` creates it.

    `attach` takes it in place of a process group, with recipes that can continue without a rank. A rank is lost at once when
    its connection breaks, and after `silence` seconds when it only stops sending heartbeats.
    """

    def __init__(self, store: Store, rank: int, size: int, silence: float = 10.0) -> None:
        self.rank, self.size, self.silence = rank, size, silence
        self.epoch = Generation(0, 0, (), ())
        self.store = SharedStore(store, rank, size).under("gossamer/members")
        self.joins = False  # True if other ranks were training when this process entered
        self.lost: str | None = None  # why the store cannot be reached any more
        self.life, self._deadline = 0, 0.0  # the incarnation: each start of this rank is another one
        self.wake: Callable[[], None] | None = None  # ends a collective that this process waits in, with an error
        self.owes = (
            0.0  # the norm of what this rank has not sent yet; its heartbeat tells it, for the case that it is lost
        )
        self.wants_to_know = False  # True once a second: `owes` is to be computed again
        self._called: int | None = None  # the generation that some rank has ended
        self._futile = list[float]()  # times at which the same members regrouped
        self._over = threading.Event()
        self._heart: threading.Thread | None = None

    @property
    def place(self) -> int:
        """Index of this rank among the present members."""
        return self.epoch.ranks.index(self.rank)

    @property
    def meeting(self) -> SharedStore:
        """Part of the store for the members of this generation only."""
        part = self.store.under(f"epoch/{self.epoch.number}")
        return SharedStore(part.raw, self.place, len(self.epoch.ranks), part.place)

    @property
    def beginning(self) -> SharedStore:
        """Part of the store that was written when training started."""
        return self.store.under(f"epoch/{self.epoch.began}")

    @property
    def is_called(self) -> bool:
        """True if some rank has ended this generation, seen by the heartbeat's thread: the members have to meet again."""
        return self._called == self.epoch.number

    def owed(self, ranks: list[int]) -> float:
        """The norms that these ranks' last heartbeats told as not sent yet, summed."""
        texts = self.beats()
        told = [texts[r].split(" ") for r in ranks if r in texts]
        return sum(float(fields[2]) for fields in told if len(fields) == 3 and _is_number(fields[2]))

    # -- join and leave ------------------------------------------------------------------------------------------------
    def enter(self, deadline: float) -> None:
        """Join the members: start together with all ranks, or join those that train. Waits at most `deadline` seconds."""
        self.leave()
        self._deadline, until = deadline, time.monotonic() + deadline
        try:
            self.life = self.store.raw.add(f"life/{self.rank}", 1)
            self._beat(0)
            self._over = threading.Event()
            self._heart = threading.Thread(target=self._live, args=(self._over,), name="gossamer-heart", daemon=True)
            may_wait(self._heart, self.store.raw)
            self._heart.start()
            while not self._is_in(latest := self.latest()):
                moving = self._moving([*range(self.size)])
                if time.monotonic() > until:
                    raise PeerError(self._missing(moving))
                self._ask_in(latest, moving)
        except RuntimeError as error:
            self.leave()
            raise self._gone(error) from None
        self.epoch, self.joins = latest, latest.began < latest.number

    def regroup(self, failure: Exception) -> None:
        """Agree on the next generation after a failure: without ranks that have no heartbeat, with ranks that have come.

        Raises `failure` if the same members have failed too often.
        """
        try:
            latest = self.latest()
            if latest.number == self.epoch.number:
                self._leave_out(failure)
                latest = self.latest()
        except RuntimeError as error:
            raise error if error is failure else self._gone(error) from None
        if self._is_in(latest):
            self.epoch = latest
        else:  # this process was stopped for so long that the others took it for dead
            self.enter(self._deadline)

    def leave(self) -> None:
        """Stop the heartbeat, and write to the store that this rank has left."""
        self._over.set()
        heart, self._heart = self._heart, None
        if heart is None or heart is threading.current_thread():
            return
        heart.join(1.0)
        if self.lost is None and not heart.is_alive():
            with suppress(RuntimeError):  # the store may be gone
                self.store.raise_flag(f"beat/{self.rank}", f"{self.life} {LEFT}")

    def _ask_in(self, latest: Generation, moving: dict[int, int]) -> None:
        working = {r for r, life in latest.living.items() if moving.get(r) == life}
        if working or len(moving) == self.size:
            self._propose(latest, moving, latest.began if working else latest.number + 1)

    def _leave_out(self, failure: Exception) -> None:
        moving = self._moving(list(self.epoch.ranks)) | {self.rank: self.life}
        if moving == self.epoch.living:
            now = time.monotonic()
            self._futile = [t for t in self._futile if now - t < 60.0] + [now]
            if len(self._futile) > FUTILE:
                raise failure
        self._propose(self.epoch, moving, self.epoch.began)

    def _propose(self, latest: Generation, moving: dict[int, int], began: int) -> None:
        """Propose the next generation, and call the members of the last one; an earlier proposal wins."""
        number, ranks = latest.number + 1, sorted(moving)
        epoch = Generation(number, began, tuple(ranks), tuple(moving[r] for r in ranks))
        self.store.raw.compare_set(f"epoch/{number}", "", json.dumps(epoch))
        self._call(latest.number)

    def _call(self, number: int) -> None:
        """End the work of one generation: its comm threads look for this flag."""
        self.store.raise_flag(f"epoch/{number}/broken", "")

    # -- present ranks -------------------------------------------------------------------------------------------------
    def latest(self) -> Generation:
        """The latest generation in the store."""
        found = self.epoch
        while self.store.flag_is_up(key := f"epoch/{found.number + 1}"):
            found = Generation.read(self.store, key)
        return found

    def _is_in(self, epoch: Generation) -> bool:
        return epoch.living.get(self.rank) == self.life

    def _moving(self, awaited: list[int]) -> dict[int, int]:
        """Ranks with a changing heartbeat, and their incarnation; looks for `LOOK` seconds, or until all awaited ones change."""
        first, moving = self.beats(), dict[int, int]()
        until = time.monotonic() + LOOK
        while time.monotonic() < until and not all(r in moving for r in awaited):
            time.sleep(BEAT / 2)
            for r, text in self.beats().items():
                if text != first.get(r) and not text.endswith(LEFT):
                    moving[r] = self._life_in(r, text)
        return moving

    def beats(self) -> dict[int, str]:
        """The last heartbeat of each rank."""
        keys = {r: f"beat/{r}" for r in range(self.size)}
        complete = self.store.are_there([*keys.values()])
        there = [r for r, key in keys.items() if complete or self.store.flag_is_up(key)]
        return dict(zip(there, self.store.read([keys[r] for r in there]), strict=True))

    def _life_in(self, rank: int, text: str) -> int:
        life = text.split(" ", maxsplit=1)[0]
        if not (life.isascii() and life.isdigit() and len(life) < 10):
            raise self.store.malformed(f"beat/{rank}", text)
        return int(life)

    # -- heartbeat -----------------------------------------------------------------------------------------------------
    def _beat(self, count: int) -> None:
        self.store.raise_flag(f"beat/{self.rank}", f"{self.life} {count} {self.owes:.9g}")

    def _live(self, over: threading.Event) -> None:
        heard, count = dict[int, tuple[str, float]](), 0
        while not over.wait(BEAT):
            count += 1
            try:
                self._beat(count)
                if count % 10 == 0:
                    heard = self._watch(heard)
            except RuntimeError as error:
                self.lost = str(error)
                return

    def _watch(self, before: dict[int, tuple[str, float]]) -> dict[int, tuple[str, float]]:
        """Make all members regroup if one has had no heartbeat for `silence` seconds; returns the last heartbeats seen.

        A broken connection may not show it, and a collective that this rank joins too late would never end.
        """
        now, epoch = time.monotonic(), self.epoch
        heard = {r: before[r] if before.get(r, ("", 0.0))[0] == t else (t, now) for r, t in self.beats().items()}
        self.wants_to_know = True
        if self.store.flag_is_up(f"epoch/{epoch.number}/broken"):
            self._called = epoch.number
        if any(now - heard[r][1] > self.silence for r in epoch.ranks if r in heard):
            self._call(epoch.number)
            if self.wake is not None and epoch is self.epoch:
                self.wake()
        return heard

    # -- errors --------------------------------------------------------------------------------------------------------
    def _missing(self, moving: dict[int, int]) -> str:
        away = [r for r in range(self.size) if r not in moving]
        return (
            f"rank {self.rank} waited {self._deadline:g} seconds, and no rank trains: {named(away)} of {self.size} "
            f"{'has' if len(away) == 1 else 'have'} not started. Start all ranks together; a rank can join later only while "
            "others train"
            if away
            else f"rank {self.rank} waited {self._deadline:g} seconds and could not join the members: check that the store "
            "answers fast enough"
        )

    def _gone(self, error: RuntimeError) -> RuntimeError:
        if isinstance(error, PeerError):
            return error
        return PeerError(
            f"rank {self.rank}: the store that holds the list of members does not answer: "
            f"{why_silent(self.store.raw, 'the process that hosts it')}. Ranks cannot find one another without it"
        )


def _is_number(text: str) -> bool:
    """True if it is a finite number that is not negative."""
    try:
        return 0 <= float(text) < float("inf")
    except ValueError:
        return False
