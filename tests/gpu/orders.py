"""Two communicators in flight at the same time must be launched in one order everywhere, or they can hang.

Two operations are loose if the later one did not wait for the earlier one. If on another rank they are launched the other
way round, and loose as well, each GPU may begin with another one and wait for ever.
"""

from collections.abc import Iterator, Sequence

from tests.gpu.nccl import Launch

Name = tuple[str, int]
NEAR = 40  # launches; what lies further back is over


def inverted(logs: Sequence[Sequence[Launch]]) -> list[str]:
    """What two ranks launch in different orders, given every rank's launches in order."""
    loose = [dict(_loose(log)) for log in logs]
    return [
        f"{words}: rank {i} launches {a} before {b}, rank {j} the other way round"
        for i, mine in enumerate(loose)
        for (a, b), words in mine.items()
        for j, theirs in enumerate(loose)
        if (b, a) in theirs and i < j
    ]


def _loose(log: Sequence[Launch]) -> Iterator[tuple[tuple[Name, Name], str]]:
    for i, later in enumerate(log):
        for earlier in log[max(0, i - NEAR) : i]:
            another = earlier.communicator != later.communicator
            if another and later.known.get(earlier.communicator, 0) < earlier.number:
                names = (earlier.communicator, earlier.number), (later.communicator, later.number)
                yield names, f"{earlier.text} and {later.text}"
