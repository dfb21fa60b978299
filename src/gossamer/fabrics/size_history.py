"""What a lane usually asks: where it asks otherwise, the ranks had better compare first."""

from gossamer.core.verbs import AllGather, AllReduce, Verb

BucketView = tuple[str, int, str]  # the program's label, how many collectives it had before, and the verb

_MANY = 10_000  # places; a lane whose labels never come again is not watched for ever


class SizeHistory:
    """The sizes that each collective of a lane has had, and which collective followed which.

    gloo ends the process where sizes differ between ranks. All ranks run the same programs in the same order, so what is
    new here is new on every rank: all see it alike, compare, and pay nothing at all other steps. A rank that takes another
    turn than the others, if only from one usual size to another, sees something new, and waits to compare it. An all-to-all
    is not watched: its sizes may change on some ranks only. Nor is a length that the ranks have just agreed on.
    """

    def __init__(self) -> None:
        self._seen = dict[BucketView, set[object]]()
        self._turns = set[tuple[object, object]]()
        self._last: object = None

    def breaks_with(self, label: str, before: int, verb: Verb, by_itself: bool) -> bool:
        """Whether a collective is unlike all that were at its place, or follows another one than ever before; note it.

        A started program's first time is no news: it follows from the set-up, which was compared. What is asked by itself
        comes from the training loop, where one rank may take a turn of its own.
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
    """What must be equal on all ranks; None where nothing must."""
    match verb:
        case AllReduce(tensor, op):
            return tensor.numel(), tensor.dtype, op
        case AllGather(wire, _, agreed) if not agreed:
            return (wire.numel(),)
        case _:
            return None
