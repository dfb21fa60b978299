"""A group of ranks on one comm thread: their connection, and the number of their collectives."""

from collections.abc import Callable

from gossamer.core.groups import listed
from gossamer.core.verbs import Among
from gossamer.fabrics.connection import Connection
from gossamer.fabrics.shared_store import SharedStore
from gossamer.fabrics.size_history import SizeHistory
from gossamer.fabrics.tickets import Tickets

Wait = Callable[[Callable[[], bool]], object]  # until something is ready


class RankGroup:
    """All ranks, or some, that run the same collectives with one another in the same order.

    Each group counts its own collectives, has its own history of sizes, and compares on its own part of the store.
    """

    def __init__(self, among: Among, lane: SharedStore, fabric: SharedStore) -> None:
        """`lane` is the store of this comm thread; `fabric` is that of all, since they share tickets."""
        self.among = among
        self.ranks = range(lane.size) if among is None else among
        self.store = lane if among is None else lane.among(among)
        self.tickets = Tickets((fabric if among is None else fabric.among(among)).under("tickets"))
        self.usual = SizeHistory()
        self.collectives = self.before = 0  # in all, and of the running program
        self.came_out = False  # True once a collective that waits for all ranks has ended since the last `meet`
        self._posted = list[tuple[SharedStore, str]]()  # keys of the last `meet`, which other ranks may still read
        self._connection: Connection | None = None

    @property
    def name(self) -> str:
        """The group's name in messages; empty for all ranks."""
        return "" if self.among is None else listed(self.among)

    @property
    def connection(self) -> Connection:
        assert self._connection is not None, "a group is connected before it is used"
        return self._connection

    def connect(self, connection: Connection) -> None:
        self._connection = connection

    def meet(self, store: SharedStore, key: str, text: str, wait: Wait) -> dict[int, str]:
        """Post a text and read those of the other ranks, by index in the group; fewer texts after a failure."""
        posts = store.meet(key, text, wait)
        if len(posts) == store.size - 1:
            self.clear()  # all ranks are here, so they have read what was posted before
            self._posted.append((store, f"{key}/{store.rank}"))
            self.came_out = False
        return posts

    def clear(self) -> None:
        for store, key in self._posted:
            store.take_down(key)
        self._posted.clear()

    def left(self) -> list[str]:
        """Full names of keys and counters that must stay until all ranks have left."""
        return [*self.tickets.open(), *(store.place + key for store, key in self._posted)]

    def tear(self) -> None:
        if self._connection is not None:
            self._connection.tear()

    def hang_up(self, patience: float) -> None:
        if self._connection is not None:
            self._connection.hang_up(patience)
