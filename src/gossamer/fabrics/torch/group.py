"""A group of ranks on one comm thread: their connection, and the number of their collectives."""

from collections.abc import Callable

from gossamer.core.groups import listed
from gossamer.core.verbs import AllGather, AllReduce, Among, Verb
from gossamer.fabrics.liveness.store import SharedStore
from gossamer.fabrics.torch.connection import Connection
from gossamer.fabrics.torch.tickets import Tickets

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

    def counts(self, verb: Verb, label: str, by_itself: bool, check: int) -> bool:
        """Count a collective that is about to begin; True if the ranks are to compare it: one of the first `check`, or unusual."""
        self.collectives += 1
        if len(self.ranks) == 1 or not check:
            return False
        return self.usual.breaks_with(label, self.before, verb, by_itself) or self.collectives <= check

    def ended(self, verb: Verb) -> None:
        """Note the end of a collective: no rank can finish one before all have started it; an empty one crosses no network."""
        match verb:
            case AllReduce(tensor) if tensor.numel():
                self.tickets.all_have_come()
                self.came_out = True
            case AllGather(wire) if wire.numel():
                self.came_out = True
            case _:
                pass

    def clear(self) -> None:
        for store, key in self._posted:
            store.take_down(key)
        self._posted.clear()

    def left(self) -> list[str]:
        """Full names of keys and counters that must stay until all ranks have left."""
        return [*self.tickets.open(), *(store.place + key for store, key in self._posted)]

    def look(self) -> None:
        """Raise an error if another rank of the group is seen to have ended."""
        if self._connection is not None:
            self._connection.look()

    def tear(self) -> None:
        if self._connection is not None:
            self._connection.tear()

    def hang_up(self, patience: float) -> None:
        if self._connection is not None:
            self._connection.hang_up(patience)


CollectivePlace = tuple[str, int, str]  # the program's label, the number of its collectives so far, and the verb

_MANY = 10_000  # entries; bounds the memory of a comm thread whose labels never repeat


class SizeHistory:
    """The sizes of each collective of a comm thread, and the order of collectives.

    gloo ends the process where sizes differ between ranks. All ranks run the same programs in the same order, so a new size
    is new on every rank: all ranks compare it, and other steps cost nothing. A rank that leaves the usual order, even from
    one usual size to another, sees something new and waits to compare it. An all-to-all is not watched, since its sizes may
    change on some ranks only; nor is a length that the ranks have just agreed on.
    """

    def __init__(self) -> None:
        self._seen = dict[CollectivePlace, set[object]]()
        self._turns = set[tuple[object, object]]()
        self._last: object = None

    def breaks_with(self, label: str, before: int, verb: Verb, by_itself: bool) -> bool:
        """True if a collective has a new size or follows another collective than before; remembers it.

        The first collective of a started program is not new: it follows from the set-up, which was compared. A request
        `by_itself` comes from the training loop, where one rank may differ from the others.
        """
        size = _size(verb)
        if size is None:
            return False
        place = label, before, type(verb).__name__
        turn = self._last, (place, size)
        self._last = place, size
        if place not in self._seen:
            if len(self._seen) < _MANY:
                self._seen[place] = {size}
                self._turns.add(turn)
            return by_itself
        usual = size in self._seen[place] and turn in self._turns
        self._seen[place].add(size)
        if len(self._turns) < 2 * _MANY:
            self._turns.add(turn)
        return not usual


def _size(verb: Verb) -> tuple[object, ...] | None:
    """The values that must be equal on all ranks; None if there are none."""
    match verb:
        case AllReduce(tensor, op):
            return tensor.numel(), tensor.dtype, op
        case AllGather(wire, _, agreed) if not agreed:
            return (wire.numel(),)
        case _:
            return None
