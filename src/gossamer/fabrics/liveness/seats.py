"""Seats: the places for members in the store, who has taken each of them, and their heartbeats.

A process takes a seat by compare and set, under a number that no other start ever has: its life. It writes its heartbeats under
that number, so a process that was frozen and wakes up never writes those of whoever has its seat now.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping
from math import inf
from typing import Any, NamedTuple, final

from gossamer.core.errors import AttachError
from gossamer.core.version import __version__
from gossamer.fabrics.liveness.store import SharedStore

BEAT = 0.1  # seconds between two heartbeats
LOOK = 1.0  # seconds in which every living rank has written a heartbeat
FREE, LEFT = "free", "left"
UNBORN = "0"  # in place of a first heartbeat, from when the seat is taken
MANY = 2**16  # seats and ranks, at most


class Terms(NamedTuple):
    """What members have in common before they wait for each other: how many may start and train, and the ranks of each."""

    least: int
    most: int
    per_node: int = 1  # ranks of a member; they share its seat
    version: str = __version__

    def refuse(self, others: "Terms") -> None:
        """Raise an error that says how members who are there were started."""
        said = {"most": "most=", "least": "least=", "per_node": "ranks on each node: ", "version": "gossamer "}
        mine, theirs = self._asdict(), others._asdict()
        differing = [
            f"{words}{theirs[key]} there and {mine[key]} here"
            for key, words in said.items()
            if mine[key] != theirs[key]
        ]
        raise AttachError(
            f"this process cannot join the members that train: {'; '.join(differing)}. Start all of them alike, or give this run a "
            "store of its own"
        )

    @staticmethod
    def of(said: Any) -> "Terms | None":
        """Terms as they were written; None for anything else."""
        found = Terms(**said)
        numbers = said["least"], said["most"], said["per_node"]
        fits = all(isinstance(n, int) and 0 < n <= MANY for n in numbers) and isinstance(said["version"], str)
        return found if fits else None


class Holder(NamedTuple):
    """Who has a seat, as the store says it; life 0 where it was never taken."""

    life: int
    text: str

    def __str__(self) -> str:
        _, process, machine = self.text.split(" ", maxsplit=2)
        return f"process {process} on {machine}"

    @staticmethod
    def read(store: SharedStore, key: str, text: str) -> "Holder":
        if text == FREE:
            return Holder(0, text)
        fields = text.split(" ", maxsplit=2)
        if len(fields) < 3 or not all(f.isascii() and f.isdigit() and len(f) < 10 for f in fields[:2]):
            raise store.malformed(key, text)
        return Holder(int(fields[0]), text)


class SeatClaim(NamedTuple):
    """A seat, and the life of the process or node that has taken it."""

    seat: int
    life: int


class Beat(NamedTuple):
    """A rank's last heartbeat. Only changes of it count: machines' clocks are never compared."""

    life: int
    said: str  # how many it has written, or that it has left

    @property
    def has_left(self) -> bool:
        return self.said == LEFT

    @property
    def owes(self) -> float:
        """The norm of what the rank had not sent yet, as it told; 0 if it told none."""
        _, _, told = self.said.partition(" ")
        try:
            owes = float(told or 0.0)
        except ValueError:
            return 0.0
        return owes if 0 <= owes < inf else 0.0


@final
class Seats:
    """The seats of a run. A rank's number is that of its seat, or on nodes of several ranks, seat * per_node + local rank."""

    def __init__(self, store: SharedStore, terms: Terms) -> None:
        self._store, self.terms = store, terms
        self.size = terms.most * terms.per_node

    # -- agree, and take one -----------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Agree on the terms with those who are there, and create the seats."""
        mine = json.dumps(self.terms._asdict())
        while (held := self._store.swap("terms", "", mine)) != mine:
            theirs = self._store.parsed("terms", held, Terms.of)
            if not Seats(self._store, theirs).moving([]):
                self._store.swap("terms", held, mine)  # those of a run that is over
            elif self._store.read(["terms"]) == [held]:  # else those who move have just begun the next run
                self.terms.refuse(theirs)
        for seat in range(self.terms.most):
            self._store.swap(f"seat/{seat}", "", FREE)

    def take(self, wish: int | None, living: Callable[[], Mapping[int, int]], silence: float) -> SeatClaim:
        """Take the seat `wish`, or the first that is free or whose member is dead; `living` are the ranks of the generation."""
        life, began, heard = self._store.raw.add("lives", 1), time.monotonic(), dict[int, tuple[Beat, float]]()
        for local in range(self.terms.per_node):  # before the seat is taken: who reads the seat finds them
            self.beat(life, local, UNBORN)
        mine = f"{life} {os.getpid()} {socket.gethostname()}"
        while True:
            held, free = self.holders(), list[int]()
            if held:
                free = self._free(held, wish, living(), heard, silence)
            for seat in free:
                if self._store.swap(f"seat/{seat}", held[seat].text, mine) == mine:
                    return SeatClaim(seat, life)
            if not free and wish is not None:
                raise AttachError(
                    f"RANK is {wish}, and {held[wish]} is that rank and lives: give each process a RANK of its own, or leave RANK "
                    "out, and the store gives each a seat"
                )
            if not free and time.monotonic() - began > silence + 3 * LOOK:
                raise AttachError(
                    f"all {self.terms.most} seats are taken by members that live: end one of them, or start all with a larger most="
                )

    def _free(
        self,
        held: Mapping[int, Holder],
        wish: int | None,
        living: Mapping[int, int],
        heard: dict[int, tuple[Beat, float]],
        silence: float,
    ) -> list[int]:
        """Seats that can be taken: never taken, left, or with a dead member; the lowest first."""
        beats, first = self.beats(), self.terms.per_node
        asked = [wish] if wish is not None else [*held]
        over = {s for s in asked if not held[s].life or all(beats[s * first + i].has_left for i in range(first))}
        doubtful = [s for s in asked if s not in over]
        lost = {s for s in doubtful if living and living.get(s * first) != held[s].life}
        if not doubtful or (wish is None and over and not lost):
            return sorted(over)
        moving, now = self.moving([r for s in doubtful for r in range(s * first, s * first + first)]), time.monotonic()
        still = [s for s in doubtful if s * first not in moving]
        for rank, beat in self.beats().items():
            heard[rank] = heard[rank] if rank in heard and heard[rank][0] == beat else (beat, now)
        silent = {s for s in still if now - heard[s * first][1] > silence}
        dead = still if wish is not None else [s for s in still if s in lost or s in silent]
        return sorted({*over, *dead})

    # -- who is there ------------------------------------------------------------------------------------------------------

    def holders(self) -> dict[int, Holder]:
        """Who has each seat; empty before the first process has come."""
        keys = [f"seat/{seat}" for seat in range(self.terms.most)]
        if not self._store.are_there(keys):
            return {}
        return {s: Holder.read(self._store, keys[s], text) for s, text in enumerate(self._store.read(keys))}

    def beats(self) -> dict[int, Beat]:
        """The last heartbeat of each rank whose seat is taken."""
        per_node = self.terms.per_node
        held = {seat: holder.life for seat, holder in self.holders().items() if holder.life}
        keys = {s * per_node + i: f"beat/{life}/{i}" for s, life in held.items() for i in range(per_node)}
        there = keys
        if per_node > 1 and keys and not self._store.are_there([*keys.values()]):
            # These seats are of a run that is over, with fewer ranks on each node; to read a missing key waits for it.
            there = {rank: key for rank, key in keys.items() if self._store.flag_is_up(key)}
        said = dict(zip(there, self._store.read([*there.values()]), strict=True))
        return {rank: Beat(held[rank // per_node], said.get(rank, LEFT)) for rank in keys}

    def moving(self, awaited: Collection[int]) -> dict[int, int]:
        """Ranks whose heartbeat changes, and their life; of a node all, or none.

        Looks for `LOOK` seconds, or until all awaited ranks have changed.
        """
        first, moving = self.beats(), dict[int, int]()
        until = time.monotonic() + LOOK
        while time.monotonic() < until and not (awaited and all(r in moving for r in awaited)):
            time.sleep(BEAT / 2)
            for rank, beat in self.beats().items():
                if beat != first.get(rank) and beat.said not in (LEFT, UNBORN):
                    moving[rank] = beat.life
        return self.whole(moving)

    def whole(self, moving: Mapping[int, int]) -> dict[int, int]:
        """Without the ranks of nodes of which one is missing."""
        return {rank: life for rank, life in moving.items() if all(moving.get(r) == life for r in self.beside(rank))}

    def beside(self, rank: int) -> range:
        """The ranks of a rank's node."""
        first = rank - rank % self.terms.per_node
        return range(first, first + self.terms.per_node)

    def beat(self, life: int, local: int, count: str) -> None:
        self._store.raise_flag(f"beat/{life}/{local}", count)
