"""What a lane usually asks: where it asks otherwise, the ranks had better compare first."""

from gossamer.core.verbs import AllGather, AllReduce, Verb

Place = tuple[str, int, str]  # the program's label, how many collectives it had before, and the verb

_MANY = 10_000  # places; a lane whose labels never come again is not watched for ever


class Habits:
    """The sizes that each collective of a lane has had.

    gloo ends the process where sizes differ between ranks. All ranks run the same programs in the same order, so a size
    that is new here is new on every rank: all see it alike, compare, and pay nothing at all other steps. An all-to-all is
    not watched: its sizes may change on some ranks only. Nor is a length that the ranks have just agreed on.
    """

    def __init__(self) -> None:
        self._seen = dict[Place, set[tuple[object, ...]]]()

    def breaks_with(self, label: str, before: int, verb: Verb) -> bool:
        """Whether a collective is unlike all that were at its place; note it.

        A started program's first time is no news: it follows from the set-up, which was compared. What is asked by itself
        comes from the training loop, where one rank may take a turn of its own.
        """
        size = _size(verb)
        if size is None:
            return False
        place = label, before, type(verb).__name__
        seen = self._seen.get(place)
        if seen is None:
            if len(self._seen) < _MANY:
                self._seen[place] = {size}
            return not label
        if size in seen:
            return False
        seen.add(size)
        return True


def _size(verb: Verb) -> tuple[object, ...] | None:
    """What must be equal on all ranks; None where nothing must."""
    match verb:
        case AllReduce(tensor, op):
            return tensor.numel(), tensor.dtype, op
        case AllGather(wire, _, agreed) if not agreed:
            return (wire.numel(),)
        case _:
            return None
