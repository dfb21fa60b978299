"""What `auto` remembers between two decisions: numbers in the recipe's state, and so in every checkpoint."""

from collections.abc import Sequence
from math import inf

import torch

from gossamer.controllers.auto_choice import WindowMedian, is_clear
from gossamer.core.bucket import State

ON_DENSE = -1  # the number of dense among candidates


class AutoState:
    """Reads and writes the numbers of a controller's state; a number or a list stands under each key.

    >>> kept = AutoState({})
    >>> kept.write("tries", 2)
    >>> kept.whole("tries"), kept.whole("off"), kept.all("found")
    (2, 0, [])
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def __contains__(self, key: str) -> bool:
        return key in self._state

    def number(self, key: str) -> float:
        return float(self._state[key])

    def whole(self, key: str, default: int = 0) -> int:
        return int(self._state.get(key, default))

    def all(self, key: str) -> list[float]:
        found = self._state.get(key)
        return [] if found is None else found.tolist()

    def write(self, key: str, value: float) -> None:
        self._state[key] = torch.tensor(value, dtype=torch.float64, device="cpu")

    def write_all(self, key: str, values: Sequence[float]) -> None:
        self._state[key] = torch.tensor([*values], dtype=torch.float64, device="cpu")

    def count(self, key: str, more: int = 1) -> int:
        """Add to a number, which is 0 at first."""
        self.write(key, self.whole(key) + more)
        return self.whole(key)

    def forget(self, *keys: str) -> None:
        for key in keys:
            self._state.pop(key, None)


class Trials:
    """The trials of one search: which candidate each was of, or dense, and what its steps took.

    A trial that has begun stands in `turns` and not yet in `found`.
    """

    def __init__(self, kept: AutoState) -> None:
        numbers = kept.all("found")
        self.turns = [int(turn) for turn in kept.all("turns")]
        self.found = [WindowMedian(*numbers[i : i + 3]) for i in range(0, len(numbers), 3)]
        self.dense_before = WindowMedian(*kept.all("dense")[:3])

    @property
    def tried(self) -> list[int]:
        """The candidates, in order of their numbers."""
        return sorted({turn for turn in self.turns if turn != ON_DENSE})

    def fastest_beside(self, number: int) -> float:
        """The least median of a trial of another candidate; infinite if there is none."""
        others = (found.middle for turn, found in zip(self.turns, self.found) if turn not in (ON_DENSE, number))
        return min(others, default=inf)

    @property
    def last_dense(self) -> WindowMedian:
        dense = self.of(ON_DENSE)
        return dense[-1][1] if dense else self.dense_before

    def of(self, number: int) -> list[tuple[int, WindowMedian]]:
        """The trials of a candidate or of dense that have ended, with their places in turn."""
        return [(i, found) for i, (turn, found) in enumerate(zip(self.turns, self.found)) if turn == number]

    def last_of(self, number: int) -> WindowMedian:
        return self.of(number)[-1][1]

    def is_beaten(self, number: int) -> bool:
        """True if another candidate was faster, and clearly faster than dense: then dense need not be timed beside this one."""
        others = [self.last_of(other) for other in self.tried if other != number]
        return any(o.middle < self.last_of(number).middle and is_clear(o, self.dense_before) for o in others)

    def dense_beside(self, place: int) -> WindowMedian:
        """The dense turn after a trial, or the last one before it."""
        after = (found for i, found in self.of(ON_DENSE) if i > place)
        return next(after, self.last_dense)
