"""Members: who trains together now. Some may die and come back; the store that tells who is there outlives them all.

Every process beats in the store. When one is lost, or one comes, whoever notices writes down who the members are from now on:
an epoch. The first word counts (compare and set), all read it, and meet anew under its name.
"""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from gossamer.core.errors import PeerError
from gossamer.fabrics.heartbeat import ranks as named
from gossamer.fabrics.reach import why_silent
from gossamer.fabrics.shared_store import SharedStore
from gossamer.fabrics.stuck import may_wait

BEAT = 0.1  # seconds between two beats
LOOK = 1.0  # seconds in which whoever lives has shown it
FUTILE = 3  # times a minute that the same members meet anew: a failure that comes back is no death
LEFT = "left"


class Generation(NamedTuple):
    """Who are members, and in which of its lives each is. All who were there when it `began` have met from the start."""

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
            said: Any = json.loads(text)
            number, began, ranks, lives = said
            fits = all(isinstance(n, int) for n in (number, began, *ranks, *lives)) and len(ranks) == len(lives) > 0
            fits = fits and list(ranks) == sorted(set(ranks)) and ranks[0] >= 0 and ranks[-1] < store.size
        except (ValueError, TypeError, RecursionError):
            raise store.malformed(key, text) from None
        if not fits:
            raise store.malformed(key, text)
        return Generation(number, began, tuple(ranks), tuple(lives))


class Members:
    """Processes of which some may die and come back; see `gossamer.members`, which makes one.

    `attach` takes it in place of a process group, under recipes that go on without a rank. A rank whose connection breaks is
    lost at once; one that only falls silent, after `silence` seconds.
    """

    def __init__(self, store: Store, rank: int, size: int, silence: float = 10.0) -> None:
        self.rank, self.size, self.silence = rank, size, silence
        self.epoch = Generation(0, 0, (), ())
        self.store = SharedStore(store, rank, size).under("gossamer/members")
        self.joins = False  # were the others at work when this process came?
        self.lost: str | None = None  # why the store cannot be asked any more
        self.life, self._deadline = 0, 0.0  # each start of this rank is another life
        self.wake: Callable[[], None] | None = None  # ends what this process waits for in the midst of a collective
        self._futile = list[float]()  # when the same members met anew
        self._over = threading.Event()
        self._heart: threading.Thread | None = None

    @property
    def place(self) -> int:
        """This rank's among those who are there."""
        return self.epoch.ranks.index(self.rank)

    @property
    def meeting(self) -> SharedStore:
        """What the members of this epoch have to themselves."""
        part = self.store.under(f"epoch/{self.epoch.number}")
        return SharedStore(part.raw, self.place, len(self.epoch.ranks), part.place)

    @property
    def beginning(self) -> SharedStore:
        """What was said when all began."""
        return self.store.under(f"epoch/{self.epoch.began}")

    # -- coming and going ----------------------------------------------------------------------------------------------

    def enter(self, deadline: float) -> None:
        """Come in: together with all others, or to those who are at work. They are waited for as long as the deadline."""
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
        """After a failure: whoever does not beat is left out, and who has come is taken in; `failure` if that is no help."""
        try:
            latest = self.latest()
            if latest.number == self.epoch.number:
                self._leave_out(failure)
                latest = self.latest()
        except RuntimeError as error:
            raise error if error is failure else self._gone(error) from None
        if self._is_in(latest):
            self.epoch = latest
        else:  # this process stood still for so long that it was taken for dead
            self.enter(self._deadline)

    def leave(self) -> None:
        """Beat no more, and say so."""
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
        """The members of the next epoch, unless somebody was faster; those of the last one are told to come."""
        number, ranks = latest.number + 1, sorted(moving)
        epoch = Generation(number, began, tuple(ranks), tuple(moving[r] for r in ranks))
        self.store.raw.compare_set(f"epoch/{number}", "", json.dumps(epoch))
        self._call(latest.number)

    def _call(self, number: int) -> None:
        """What the members of an epoch do together is over: their lanes look for this flag."""
        self.store.raise_flag(f"epoch/{number}/broken", "")

    # -- who is there --------------------------------------------------------------------------------------------------

    def latest(self) -> Generation:
        """Who was written down last."""
        found = self.epoch
        while self.store.flag_is_up(key := f"epoch/{found.number + 1}"):
            found = Generation.read(self.store, key)
        return found

    def _is_in(self, epoch: Generation) -> bool:
        return epoch.living.get(self.rank) == self.life

    def _moving(self, awaited: list[int]) -> dict[int, int]:
        """Whose beats change while we look, and in which life: as soon as all who are awaited have moved, or in the end."""
        first, moving = self.beats(), dict[int, int]()
        until = time.monotonic() + LOOK
        while time.monotonic() < until and not all(r in moving for r in awaited):
            time.sleep(BEAT / 2)
            for r, text in self.beats().items():
                if text != first.get(r) and not text.endswith(LEFT):
                    moving[r] = self._life_in(r, text)
        return moving

    def beats(self) -> dict[int, str]:
        """What each rank said last."""
        keys = {r: f"beat/{r}" for r in range(self.size)}
        complete = self.store.are_there([*keys.values()])
        there = [r for r, key in keys.items() if complete or self.store.flag_is_up(key)]
        return dict(zip(there, self.store.read([keys[r] for r in there]), strict=True))

    def _life_in(self, rank: int, text: str) -> int:
        life = text.split(" ", maxsplit=1)[0]
        if not (life.isascii() and life.isdigit() and len(life) < 10):
            raise self.store.malformed(f"beat/{rank}", text)
        return int(life)

    # -- the heart -----------------------------------------------------------------------------------------------------

    def _beat(self, count: int) -> None:
        self.store.raise_flag(f"beat/{self.rank}", f"{self.life} {count}")

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
        """Call all together where a member has been silent for too long: no connection may tell of it, and a collective that
        nobody joins, since this rank was late for it, would never end.
        """
        now, epoch = time.monotonic(), self.epoch
        heard = {r: before[r] if before.get(r, ("", 0.0))[0] == t else (t, now) for r, t in self.beats().items()}
        if any(now - heard[r][1] > self.silence for r in epoch.ranks if r in heard):
            self._call(epoch.number)
            if self.wake is not None and epoch is self.epoch:
                self.wake()
        return heard

    # -- what goes wrong -----------------------------------------------------------------------------------------------

    def _missing(self, moving: dict[int, int]) -> str:
        away = [r for r in range(self.size) if r not in moving]
        return (
            f"rank {self.rank} has waited for {self._deadline:g} seconds, and nobody is at work: {named(away)} of {self.size} "
            f"{'is' if len(away) == 1 else 'are'} not here. All start together; who comes later needs others that train"
            if away
            else f"rank {self.rank} has waited for {self._deadline:g} seconds, and was not let in; is the store very slow?"
        )

    def _gone(self, error: RuntimeError) -> RuntimeError:
        if isinstance(error, PeerError):
            return error
        return PeerError(
            f"rank {self.rank}: the store that tells who is there does not answer: {why_silent(self.store.raw, 'the process that holds it')}. Nobody can be told "
            "of one another without it"
        )
