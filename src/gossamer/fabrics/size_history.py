"""Remembers the sizes of a comm thread's collectives, so that ranks compare unusual ones before they begin."""

from gossamer.core.verbs import AllGather, AllReduce, Verb

BucketView = tuple[str, int, str]  # the program's label, the number of its collectives so far, and the verb

_MANY = 10_000  # entries; bounds the memory of a comm thread whose labels never repeat


class SizeHistory:
    """The sizes of each collective of a comm thread, and the order of collectives.

    gloo ends the process where sizes differ between ranks. All ranks run the same programs in the same order, so a new size
    is new on every rank: all ranks compare it, and other steps cost nothing. A rank that leaves the usual order, even from
    one usual size to another, sees something new and waits to compare it. An all-to-all is not watched, since its sizes may
    change on some ranks only; nor is a length that the ranks have just agreed on.
    """

    def __init__(self) -> None:
        self._seen = dict[BucketView, set[object]]()
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
