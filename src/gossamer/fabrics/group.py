"""A group of a lane's ranks: the connection between them, and how far they have come together."""

from collections.abc import Callable

from gossamer.core.groups import listed
from gossamer.core.verbs import Among
from gossamer.fabrics.connection import Connection
from gossamer.fabrics.shared_store import SharedStore
from gossamer.fabrics.size_history import SizeHistory
from gossamer.fabrics.tickets import Tickets

Wait = Callable[[Callable[[], bool]], object]  # until something is ready


class RankGroup:
    """Everybody, or those who were named. All of them ask the same of one another, in the same order; nobody else need know.

    So each group counts its own collectives, has its own usual sizes, and compares on a store of its own.
    """

    def __init__(self, among: Among, lane: SharedStore, fabric: SharedStore) -> None:
        """`lane` is the store of the lane, and `fabric` that of all lanes: one may claim what another waits for."""
        self.among = among
        self.ranks = range(lane.size) if among is None else among
        self.store = lane if among is None else lane.among(among)
        self.tickets = Tickets((fabric if among is None else fabric.among(among)).under("tickets"))
        self.usual = SizeHistory()
        self.collectives = self.before = 0  # in all, and of the program under way
        self.came_out = False  # of a collective after the last meeting, to which all had come
        self._posted = list[tuple[SharedStore, str]]()  # keys of the last meeting, which others may still read
        self._connection: Connection | None = None

    @property
    def name(self) -> str:
        """What other ranks know it by; nothing for everybody."""
        return "" if self.among is None else listed(self.among)

    @property
    def connection(self) -> Connection:
        assert self._connection is not None, "a group is connected before it is used"
        return self._connection

    def connect(self, connection: Connection) -> None:
        self._connection = connection

    def meet(self, store: SharedStore, key: str, text: str, wait: Wait) -> dict[int, str]:
        """Post a text and read everybody else's, by place in the group; fewer, if there is no more hope."""
        posts = store.meet(key, text, wait)
        if len(posts) == store.size - 1:
            self.clear()  # who has come here has read what was posted before
            self._posted.append((store, f"{key}/{store.rank}"))
            self.came_out = False
        return posts

    def clear(self) -> None:
        for store, key in self._posted:
            store.take_down(key)
        self._posted.clear()

    def left(self) -> list[str]:
        """Keys and counters that are there as long as anybody may come, from where the whole store begins."""
        return [*self.tickets.open(), *(store.place + key for store, key in self._posted)]

    def tear(self) -> None:
        if self._connection is not None:
            self._connection.tear()

    def hang_up(self, patience: float) -> None:
        if self._connection is not None:
            self._connection.hang_up(patience)
