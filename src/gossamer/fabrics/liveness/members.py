"""Elastic members: the ranks that train together now, of which some may die and come back.

Every process takes a seat in a store that outlives all ranks, and writes a heartbeat there. When a rank is lost or joins, the
rank that notices it proposes the next generation: the list of members from now on. The first proposal wins (compare and set).
All members read it and connect again under its number. Whoever comes waits until those who came before it are at work.
"""

import json
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from math import inf
from typing import Any, NamedTuple

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from gossamer.core.errors import AttachError, GossamerError, PeerError
from gossamer.core.verbs import MembersLeave
from gossamer.fabrics.liveness.heartbeat import ranks as named
from gossamer.fabrics.liveness.node import NodeRanks
from gossamer.fabrics.liveness.seats import BEAT, LEFT, MANY, Beat, SeatClaim, Seats, Terms
from gossamer.fabrics.liveness.store import SharedStore, may_wait, why_silent

FUTILE = 3  # regroups a minute with the same members; after that, the failure is not a lost rank, and is raised
LEAVING = 2.0  # seconds after which one who has left is missed: those who end together have ended by then


class Generation(NamedTuple):
    """The members from one regroup to the next, and the incarnation of each: a number that no other start has.

    `began` is the number of the generation in which training started.
    """

    number: int
    began: int
    ranks: tuple[int, ...]
    lives: tuple[int, ...]

    @property
    def living(self) -> dict[int, int]:
        return dict(zip(self.ranks, self.lives))

    def among(self, local: int, per_node: int) -> "Generation":
        """Of each node only the rank with this local number."""
        kept = [i for i, rank in enumerate(self.ranks) if rank % per_node == local]
        return self._replace(ranks=tuple(self.ranks[i] for i in kept), lives=tuple(self.lives[i] for i in kept))

    @staticmethod
    def of(fields: Any) -> "Generation | None":
        """A generation as it was written; None for anything else."""
        number, began, ranks, lives = fields
        fits = all(isinstance(n, int) for n in (number, began, *ranks, *lives)) and len(ranks) == len(lives) > 0
        fits = fits and list(ranks) == sorted(set(ranks)) and ranks[0] >= 0 and ranks[-1] < MANY
        return Generation(number, began, tuple(ranks), tuple(lives)) if fits else None


class Members:
    """A set of processes of which some may die and come back, and more may come; `gossamer.members` creates it.

    `attach` takes it in place of a process group, with recipes that can continue without a rank. A rank is lost at once when
    its connection breaks, and after `silence` seconds when it only stops sending heartbeats.

    `size` ranks can take part, and training starts with `least` of them (all, if it is not given). Without a `rank` the store
    gives one. The ranks of a `node` of several come, and are lost, together. Where they hold the shards of one model (`by_shard`),
    each connects only to those with its local number; but all have one list of members.
    """

    def __init__(
        self,
        store: Store,
        rank: int | None,
        size: int,
        silence: float = 10.0,
        least: int | None = None,
        node: NodeRanks | None = None,
    ) -> None:
        self.node = node or NodeRanks()
        self._wish = rank  # of the user's, for a node of one rank
        self.rank, self.size, self.silence = rank or 0, size, silence
        self.epoch = Generation(0, 0, (), ())
        self.store = SharedStore(store, self.rank, size).under("gossamer/members")
        per_node = self.node.size
        self.seats = Seats(self.store, Terms((least or size) // per_node, size // per_node, per_node))
        self.by_shard = False  # set before `enter`
        self.weight, self.weights = 1.0, tuple[float, ...]()  # of this rank; of those present, if they differ
        self.joins = False  # True if other ranks were training when this process entered
        self.lost: str | None = None  # why the store cannot be reached any more
        self.life, self._deadline = 0, 0.0  # the incarnation: each start of this rank is another one
        self.wake: Callable[[], None] | None = None  # ends a collective that this process waits in, with an error
        self._works = False  # True once this process trains
        self._attempts = 0  # to connect, since it has entered, that have failed
        # The norm of what this rank has not sent yet. Its heartbeat tells it, for the case that it is lost.
        self.owes = 0.0
        self.wants_to_know = False  # True once a second: `owes` is to be computed again
        self.each_beat: Callable[[bool], None] | None = None  # called after each heartbeat; with True once a second
        self.parted = set[tuple[int, int]]()  # ranks and lives that have handed over what they owed, of this generation
        self._called: int | None = None  # the generation that some rank has ended
        self._futile = list[float]()  # times at which the same members regrouped
        self._over = threading.Event()
        self._heart: threading.Thread | None = None

    @property
    def place(self) -> int:
        """Index of this rank among the present members."""
        return self.present.ranks.index(self.rank)

    @property
    def present(self) -> Generation:
        """The members of this generation that this rank connects to."""
        return self._connected(self.epoch)

    def _connected(self, epoch: Generation) -> Generation:
        return epoch.among(self.node.local, self.node.size) if self.by_shard else epoch

    @property
    def meeting(self) -> SharedStore:
        """Part of the store for the members of this generation only."""
        part = self._of_those(self.store.under(f"epoch/{self.epoch.number}"))
        return SharedStore(part.raw, self.place, len(self.present.ranks), part.place)

    def _of_those(self, part: SharedStore) -> SharedStore:
        return part.under(f"shard{self.node.local}") if self.by_shard else part

    @property
    def beginning(self) -> SharedStore:
        """Part of the store that was written when training started."""
        return self._of_those(self.store.under(f"epoch/{self.epoch.began}"))

    @property
    def is_called(self) -> bool:
        """True if some rank has ended this generation, seen by the heartbeat's thread: the members have to meet again."""
        return self._called == self.epoch.number

    def step_ended(self) -> None:
        """Say after the first step that this process trains. Raise an error once the store is lost: a run may begin beside this one."""
        try:
            if not self._works:
                self.at_work()
        except RuntimeError as error:
            raise self._gone(error) from None
        if self.lost is not None:
            raise self._gone(RuntimeError(self.lost))

    def owed(self, ranks: list[int]) -> float:
        """The norms that these ranks' last heartbeats told as not sent yet, summed."""
        try:
            beats = self.seats.beats()
        except RuntimeError as error:
            raise self._gone(error) from None
        return sum(beats[r].owes for r in ranks if r in beats)

    # -- join and leave ------------------------------------------------------------------------------------------------
    def enter(self, deadline: float) -> None:
        """Join the members: start together with the first, or join those that train. Waits at most `deadline` seconds."""
        self._works = False
        self._enter(deadline, self._claim)

    def _enter(self, deadline: float, claim_seat: Callable[[], SeatClaim]) -> None:
        self.leave()
        self._deadline, until = deadline, time.monotonic() + deadline
        self._attempts = 0
        try:
            claim = self.node.agreed(claim_seat, until)
            self.rank, self.life = claim.seat * self.node.size + self.node.local, claim.life
            # Before the first heartbeat: whoever sees that may count on this rank, and reads its weight.
            self.store.raise_flag(self._key("weight", self.rank, self.life), repr(float(self.weight)))
            self._beat(0)
            self._over = threading.Event()
            self._heart = threading.Thread(target=self._live, args=(self._over,), name="gossamer-heart", daemon=True)
            may_wait(self._heart, self.store.raw)
            self._heart.start()
            if self._works:
                self.at_work()
            heard = time.monotonic()  # time of the last sign of those who train
            while not self._is_in(latest := self.latest()):
                moving, now = self.seats.moving(range(self.size)), time.monotonic()
                if now > until:
                    raise PeerError(self._missing(latest, moving))
                heard = now if _working(latest, moving) else heard
                self._ask_in(latest, moving, now - heard > self.silence)
        except RuntimeError as error:
            self.leave()
            raise self._gone(error) from None
        self.joins = latest.began < latest.number
        self._take_up(latest)

    def _claim(self) -> SeatClaim:
        self.seats.prepare()
        return self.seats.take(self._wish, lambda: self.latest().living, self.silence)

    def _claim_again(self) -> SeatClaim:
        """Take the seat that this process had before the others took it for dead."""
        try:
            return self.seats.take(self.rank // self.node.size, lambda: self.latest().living, self.silence)
        except AttachError:
            raise PeerError(
                f"rank {self.rank} was silent for more than {self.silence:g} seconds, and its seat was given to another process: start "
                "it again, and it gets a seat of its own"
            ) from None

    def at_work(self) -> None:
        """Say that this process trains. Whoever comes waits for that, so that it disturbs no one who attaches, or loads a checkpoint."""
        self._works = True
        self.store.raise_flag(self._key("works", self.rank, self.life), "")

    def regroup(self, failure: Exception) -> None:
        """Agree on the next generation after a failure: without ranks that have no heartbeat, with ranks that have come.

        Raises `failure` if the same members have failed too often.
        """
        self._attempts += 1
        try:
            latest = self.latest()
            if latest.number == self.epoch.number:
                self._leave_out(failure)
                latest = self.latest()
        except RuntimeError as error:
            raise error if error is failure else self._gone(error) from None
        if self._is_in(latest):
            self._take_up(latest)
            return
        if self._attempts > 1 and not self._works:
            raise PeerError(
                f"rank {self.rank} has come to others that train, who could not connect to it, or lost it, and go on without it: check with "
                "`gossamer doctor --quick` that gloo takes a network card on which they reach this machine, and start it again"
            ) from failure
        beside = self.seats.beside(self.rank)
        if self.by_shard:  # its ranks would come back one by one, and hold shards of unlike steps
            raise PeerError(
                f"the others took the node of rank {self.rank} for dead, after {self.silence:g} seconds of silence, and go on without it: "
                "start the node again by its torchrun, or let that do it with --max-restarts"
            )
        returns = any(rank in beside and beat.has_left for rank, beat in self.seats.beats().items())
        if self.node.size > 1 and not returns:  # else another rank of this node comes back already
            self._refuse_alone(self.seats.moving(beside))
        self._enter(self._deadline, self._claim_again)  # stopped for so long that the others took this process for dead

    def _take_up(self, epoch: Generation) -> None:
        connected = self._connected(epoch)
        keys = [self._key("weight", rank, life) for rank, life in connected.living.items()]
        try:
            told = zip(keys, self.store.read(keys), strict=True)
            weights = tuple(self.store.parsed(key, text, _weight) for key, text in told)
        except RuntimeError as error:
            raise self._gone(error) from None
        self.epoch, self.weights = epoch, weights if len({*weights}) > 1 else ()

    def leave(self) -> None:
        """Stop the heartbeat, and write to the store that this rank has left."""
        self._over.set()
        heart, self._heart = self._heart, None
        if heart is None or heart is threading.current_thread():
            return
        heart.join(1.0)
        if self.lost is None and not heart.is_alive():
            with suppress(RuntimeError):  # the store may be gone
                self.seats.beat(self.life, self.node.local, LEFT)

    def _ask_in(self, latest: Generation, moving: Mapping[int, int], silent: bool) -> None:
        """Join those who train, once all of them are at work; or start, if there are none and enough have come.

        Members that only stood still for a moment must not find that others have started without them.
        """
        if moving.get(self.rank) != self.life:
            return
        if working := _working(latest, moving):
            if self.store.are_there([self._key("works", r, life) for r, life in working.items()]):
                self._propose(latest, moving, latest.began)
        elif len(moving) >= self.seats.terms.least * self.node.size and (silent or self._are_gone(latest)):
            self._propose(latest, moving, latest.number + 1)

    def _are_gone(self, latest: Generation) -> bool:
        """True if all of a generation have left, or their seats have been given to others."""
        beats = self.seats.beats()
        return all(r not in beats or beats[r].life != life or beats[r].has_left for r, life in latest.living.items())

    def announce(self, leaving: MembersLeave) -> None:
        """Propose the next generation before any connection ends, without the ranks that leave: nobody looks for their heartbeats."""
        try:
            if self.latest().number > self.epoch.number:
                return
            moving = self.seats.moving([r for r in self.epoch.ranks if r not in leaving.ranks])
            moving = {rank: life for rank, life in moving.items() if rank not in leaving.ranks}
            self._propose(self.epoch, moving | {self.rank: self.life}, self.epoch.began)
        except RuntimeError as error:
            raise self._gone(error) from None

    def _leave_out(self, failure: Exception) -> None:
        moving = self.seats.moving(self.epoch.ranks)
        self._refuse_alone(moving)
        moving[self.rank] = self.life
        if moving == self.epoch.living:
            now = time.monotonic()
            self._futile = [t for t in self._futile if now - t < 60.0] + [now]
            if len(self._futile) > FUTILE:
                raise failure
            if len(self._futile) > 1:
                moving = self._at_work(moving)
        self._propose(self.epoch, moving, self.epoch.began)

    def _at_work(self, moving: Mapping[int, int]) -> dict[int, int]:
        """Without those who have come and do not train yet: where nobody is lost, the others cannot connect to one of them."""
        own = self.seats.beside(self.rank)
        return self.seats.whole(
            {r: life for r, life in moving.items() if r in own or self.store.flag_is_up(self._key("works", r, life))}
        )

    def _refuse_alone(self, moving: Mapping[int, int]) -> None:
        """Raise an error if a rank of this node is lost: its ranks train together, or not at all."""
        if self.node.size > 1 and self.rank not in moving:
            raise PeerError(
                f"a rank of this node (ranks {', '.join(map(str, self.seats.beside(self.rank)))}) is lost, so rank {self.rank} leaves too, "
                "and the other members go on: start the node again by its torchrun, or let that do it with --max-restarts"
            )

    def _propose(self, latest: Generation, moving: Mapping[int, int], began: int) -> None:
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
        """The latest generation in the store. Who comes knows none, and a run may have had many: their numbers follow one another."""
        number, step = self.epoch.number, 1
        while self.store.flag_is_up(f"epoch/{number + step}"):
            number, step = number + step, 2 * step
        while step > 1:
            step //= 2
            number += step * self.store.flag_is_up(f"epoch/{number + step}")
        if number == self.epoch.number:
            return self.epoch
        (text,) = self.store.read([key := f"epoch/{number}"])
        return self.store.parsed(key, text, Generation.of)

    def _is_in(self, epoch: Generation) -> bool:
        return epoch.living.get(self.rank) == self.life

    def _key(self, word: str, rank: int, life: int) -> str:
        return f"{word}/{life}/{rank % self.node.size}"

    # -- heartbeat -----------------------------------------------------------------------------------------------------
    def _beat(self, count: int) -> None:
        self.seats.beat(self.life, self.node.local, f"{count} {self.owes:.9g}")

    def _live(self, over: threading.Event) -> None:
        heard, count = dict[int, tuple[Beat, float]](), 0
        while not over.wait(BEAT):
            count += 1
            try:
                self._beat(count)
                if count % 10 == 0:
                    heard = self._watch(heard)
                if self.each_beat is not None:
                    self.each_beat(count % 10 == 0)
            except RuntimeError as error:
                self.lost = str(error)
                return

    def _watch(self, before: dict[int, tuple[Beat, float]]) -> dict[int, tuple[Beat, float]]:
        """Make all members regroup if one has had no heartbeat for `silence` seconds, or has left; returns the last heartbeats.

        A broken connection may not show it, and a collective that this rank joins too late would never end.
        """
        now, epoch = time.monotonic(), self.epoch
        heard = {
            r: before[r] if r in before and before[r][0] == beat else (beat, now)
            for r, beat in self.seats.beats().items()
        }
        self.wants_to_know = True
        if self.store.flag_is_up(f"epoch/{epoch.number}/broken"):
            self._called = epoch.number
            self._follow_other_shards(epoch)
        patience = {r: LEAVING if beat.has_left else self.silence for r, (beat, _) in heard.items()}
        if any(now - heard[r][1] > patience[r] for r in epoch.ranks if r in heard):
            self._call(epoch.number)
            if self.wake is not None and epoch is self.epoch:
                self.wake()
        return heard

    def _follow_other_shards(self, epoch: Generation) -> None:
        """End what this rank waits for if other shards have left a node out, whose rank with this shard may still be alive."""
        if not self.by_shard or self.wake is None:
            return
        following = self.latest().living
        if any(following.get(rank) != life for rank, life in epoch.living.items()) and epoch is self.epoch:
            self.wake()

    # -- errors --------------------------------------------------------------------------------------------------------
    def _missing(self, latest: Generation, moving: Collection[int]) -> str:
        waited = f"rank {self.rank} waited {self._deadline:g} seconds"
        if any(r in moving for r in latest.ranks):
            return (
                f"{waited} and could not join the members: one of them has not done its first step, or the store is slow. Check the ends of "
                "their logs, and start this rank again"
            )
        came = {r: str(holder) for r, holder in self.seats.holders().items() if r * self.node.size in moving}
        least, what = self.seats.terms.least, "nodes" if self.node.size > 1 else "members"
        there = ", ".join(f"{r} ({holder})" for r, holder in came.items()) or "none"
        if len(came) >= least:
            return f"{waited} and could not join the members: check that the store answers fast enough"
        if least < self.seats.terms.most:
            return f"{waited}, and {len(came)} of at least {least} {what} came: {there}. Start more of them, or all with a smaller least="
        away = [r for r in range(least) if r not in came]
        return (
            f"{waited}, and no rank trains: {named(away)} of {least} {'has' if len(away) == 1 else 'have'} not started; there are {there}. "
            "Start all ranks together, or with least= fewer; a rank can join later only while others train"
        )

    def _gone(self, error: RuntimeError) -> RuntimeError:
        if isinstance(error, GossamerError):
            return error
        return PeerError(
            f"rank {self.rank}: the store that holds the list of members does not answer: "
            f"{why_silent(self.store.raw, 'the process that hosts it')}. Ranks cannot find one another without it"
        )


def _working(latest: Generation, moving: Mapping[int, int]) -> dict[int, int]:
    """The members of a generation that have a heartbeat, and the life of each."""
    return {rank: life for rank, life in latest.living.items() if moving.get(rank) == life}


def _weight(said: Any) -> float | None:
    return said if isinstance(said, float) and 0 <= said < inf else None
