"""Slow ranks on purpose: a sleep in each of their steps, or in random ones."""

import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.core.errors import RecipeError

_FORM = re.compile(r"(\d{1,6}|all):(\d{1,7}(?:\.\d+)?)(?::(0?\.\d+|1|1\.0))?")


@dataclass(frozen=True)
class Straggler:
    """A rank that sleeps before its gradient: 'RANK:MS' in every step, 'RANK:MS:CHANCE' at random, 'all:...' for every rank.

    >>> Straggler.of("3:200"), Straggler.of("all:150:0.05")
    (Straggler(rank=3, seconds=0.2, chance=1.0), Straggler(rank=None, seconds=0.15, chance=0.05))
    """

    rank: int | None  # None: every rank, independently
    seconds: float
    chance: float = 1.0

    @staticmethod
    def of(text: str, size: int | None = None) -> "Straggler":
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise RecipeError(
                f"--slow takes RANK:MS or RANK:MS:CHANCE, such as '3:200' or 'all:150:0.05', not {text[:40]!r}"
            )
        rank = None if found[1] == "all" else int(found[1])
        if size is not None and rank is not None and rank >= size:
            raise RecipeError(f"--slow {text.strip()}: there is no rank {rank} among {size}")
        return Straggler(rank, float(found[2]) / 1000, float(found[3] or 1.0))

    def at(self, rank: int, step: int, seed: int = 0) -> float:
        """Seconds that a rank sleeps in a step; the same for every run."""
        if self.rank not in (None, rank):
            return 0.0
        drawn = random.Random(f"{seed} {rank} {step} {self.seconds}").random()
        return self.seconds if drawn < self.chance else 0.0


def sleep(slow: Sequence[str], rank: int, step: int, seed: int = 0) -> None:
    """Sleep for the sum of all entries of `slow` that apply to this rank and step."""
    if seconds := sum(Straggler.of(text).at(rank, step, seed) for text in slow):
        time.sleep(seconds)
