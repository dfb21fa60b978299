"""Laws of computing: by how much longer than the model's own seconds a rank computes in a step, and the slowest of many."""

import csv
import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import erf, exp, inf, lgamma, log, sqrt
from pathlib import Path
from typing import final

from gossamer.backups import expected
from gossamer.core.errors import CostError

FEWEST = 200  # rows of a rank in a trace
WIDEST = 2.0  # sigma of a lognormal law
CUTS = 2000  # of an integral
NEAR = 1e-3  # of the mean: less than so little nobody takes
FORWARD = 1 / 3  # of a step's computing, after which gradients begin to come, where nothing was measured


class ComputingLaw(ABC):
    """Draws are of mean 1, but for a slow rank's. Law: `slowest` never falls with more ranks, nor rises with more steps."""

    @abstractmethod
    def at(self, rank: int, step: int) -> float:
        """How many times the model's seconds a rank takes in a step; the same for every recipe."""

    def share_below(self, x: float, steps: int) -> float:
        """The share of means over `steps` draws that are at most x."""
        return float(x >= 1)

    def all_below(self, x: float, ranks: int, steps: int) -> float:
        """The share of rounds in which the means of so many ranks are all at most x."""
        return self.share_below(x, steps) ** ranks

    def slowest(self, ranks: int, steps: int) -> float:
        """The expected mean over `steps` draws of the slowest of so many ranks, which all others wait for."""
        top = 1.0
        while self.all_below(top, ranks, steps) < 1 - 1e-9 and top < 1e6:
            top *= 1.2
        # Cuts are as long as they are far away, since the tail of a law may be a thousand times as long as its body.
        growth = (top / NEAR) ** (1 / CUTS)
        middles = [NEAR * growth ** (i + 0.5) for i in range(CUTS)]
        width = growth**0.5 - growth**-0.5
        return NEAR + sum(width * x * (1 - self.all_below(x, ranks, steps)) for x in middles)

    def slowest_at(self, share: float, ranks: int, steps: int) -> float:
        """What the slowest of so many ranks takes at most in this share of rounds."""
        low, high = 0.0, 1.0
        while self.all_below(high, ranks, steps) < share:
            low, high = high, 2 * high
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self.all_below(middle, ranks, steps) < share else (low, middle)
        return high


@final
@dataclass(frozen=True)
class Constant(ComputingLaw):
    """Every rank takes the model's seconds, always."""

    def at(self, rank: int, step: int) -> float:
        return 1.0

    def slowest(self, ranks: int, steps: int) -> float:
        return 1.0


@final
@dataclass(frozen=True)
class ShiftedExponential(ComputingLaw):
    """1 - tail, and on top an exponential draw of mean `tail`.

    >>> round(ShiftedExponential(0.2).slowest(32, 1), 2)
    1.61
    """

    tail: float

    def __post_init__(self) -> None:
        if not 0 < self.tail <= 1:
            raise CostError(f"tail must lie above 0 and up to 1, not {self.tail:g}: it is the random share of the mean")

    def at(self, rank: int, step: int) -> float:
        return 1 - self.tail + _dice(rank, step).expovariate(1 / self.tail)

    def share_below(self, x: float, steps: int) -> float:
        g = steps * (x - 1 + self.tail) / self.tail
        if g <= 0:
            return 0.0
        return max(1 - sum(exp(k * log(g) - g - lgamma(k + 1)) for k in range(steps)), 0.0)

    def slowest(self, ranks: int, steps: int) -> float:
        return expected(ranks, 0, 1 - self.tail, self.tail) if steps == 1 else super().slowest(ranks, steps)


@final
@dataclass(frozen=True)
class Lognormal(ComputingLaw):
    """`sigma` is the deviation of the logarithm. A mean of several draws is taken for lognormal too, of its own variance.

    >>> round(Lognormal(0.2).slowest(32, 1), 2)
    1.49
    """

    sigma: float

    def __post_init__(self) -> None:
        if not 0 < self.sigma <= WIDEST:
            raise CostError(f"sigma must lie above 0 and up to {WIDEST:g}, not {self.sigma:g}")

    def at(self, rank: int, step: int) -> float:
        return exp(_dice(rank, step).gauss(-self.sigma * self.sigma / 2, self.sigma))

    def share_below(self, x: float, steps: int) -> float:
        if x <= 0:
            return 0.0
        variance = log(1 + (exp(self.sigma**2) - 1) / steps)
        return 0.5 * (1 + erf((log(x) + variance / 2) / sqrt(2 * variance)))


@final
@dataclass(frozen=True)
class SlowRank(ComputingLaw):
    """One rank takes `factor` times as long, in a `share` of its steps drawn at random; all others are as the model says."""

    factor: float
    share: float = 1.0
    rank: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.factor < inf:
            raise CostError(f"factor must be 1 or more, not {self.factor:g}")
        if not 0 < self.share <= 1:
            raise CostError(f"share must lie above 0 and up to 1, not {self.share:g}")

    def at(self, rank: int, step: int) -> float:
        return self.factor if rank == self.rank and _dice(rank, step).random() < self.share else 1.0

    def slowest(self, ranks: int, steps: int) -> float:
        return 1 + self.share * (self.factor - 1)

    def slowest_at(self, share: float, ranks: int, steps: int) -> float:
        if self.share == 1 or steps > 1:
            return self.slowest(ranks, steps)
        return self.factor if share > 1 - self.share else 1.0


@final
@dataclass(frozen=True, eq=False)
class Trace(ComputingLaw):
    """Rows of measured seconds, one sequence for each rank, relative to the mean of all of them; `ranks` are those that are left,
    all by default.
    """

    rows: tuple[tuple[float, ...], ...]
    ranks: tuple[int, ...] = ()

    @property
    def _left(self) -> Sequence[int]:
        return self.ranks or range(len(self.rows))

    def of(self, ranks: Iterable[int]) -> "Trace":
        """The law where only these ranks are left; each keeps its own row."""
        return replace(self, ranks=tuple(self._left[rank % len(self._left)] for rank in ranks))

    @cached_property
    def _relative(self) -> tuple[tuple[float, ...], ...]:
        mean = sum(map(sum, self.rows)) / sum(map(len, self.rows))
        return tuple(tuple(seconds / mean for seconds in self.rows[rank]) for rank in self._left)

    def at(self, rank: int, step: int) -> float:
        row = self._relative[rank % len(self._left)]
        return row[step % len(row)]

    @lru_cache(maxsize=64)  # noqa: B019  a plan asks for few lengths of rounds, and ends
    def _means(self, steps: int) -> list[list[float]]:
        """Means of runs of so many steps in a row, of each row in order."""
        return [
            sorted(sum(row[(i + k) % len(row)] for k in range(steps)) / steps for i in range(len(row)))
            for row in self._relative
        ]

    def share_below(self, x: float, steps: int) -> float:
        means = self._means(steps)
        return sum(bisect_right(row, x) for row in means) / sum(map(len, means))

    def all_below(self, x: float, ranks: int, steps: int) -> float:
        """Each rank has its own row, as in `at`: one that is always slow is the slowest in every round."""
        out = 1.0
        for i, row in enumerate(self._means(steps)):
            like = ranks // len(self._left) + (i < ranks % len(self._left))
            out *= (bisect_right(row, x) / len(row)) ** like
        return out


@final
@dataclass(frozen=True)
class AtShare(ComputingLaw):
    """Another law, with what its slowest rank takes at most in a share of rounds in place of what is expected."""

    law: ComputingLaw
    share: float

    def at(self, rank: int, step: int) -> float:
        return self.law.at(rank, step)

    def slowest(self, ranks: int, steps: int) -> float:
        return self.law.slowest_at(self.share, ranks, steps)


def _dice(rank: int, step: int) -> random.Random:
    return random.Random(f"{rank} {step} computing")


def law_of(text: str) -> ComputingLaw:
    """Read a law as flags have it.

    >>> law_of("lognormal 0.2"), law_of("exponential 0.1"), law_of("slow 2"), law_of("slow 5 0.02")
    (Lognormal(sigma=0.2), ShiftedExponential(tail=0.1), SlowRank(factor=2.0, share=1.0, rank=0), SlowRank(factor=5.0, share=0.02, rank=0))
    """
    kind, *rest = text.split() or [""]
    if kind == "trace" and len(rest) == 1:
        return read_trace(Path(rest[0]))
    try:
        numbers = [float(word) for word in rest]
    except ValueError:
        numbers = [inf] * 9
    match kind, numbers:
        case "constant", []:
            return Constant()
        case "exponential", [tail]:
            return ShiftedExponential(tail)
        case "lognormal", [sigma]:
            return Lognormal(sigma)
        case "slow", [factor]:
            return SlowRank(factor)
        case "slow", [factor, share]:
            return SlowRank(factor, share)
        case _:
            raise CostError(
                f"{text!r} is no law of computing: write 'constant', 'lognormal 0.2', 'exponential 0.2', 'slow 2', 'slow 5 0.02' or "
                "'trace FILE'"
            )


def read_trace(path: Path) -> Trace:
    """Read rows of rank, step, seconds. An error names the file, the line and the field."""
    try:
        lines = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
    except OSError as error:
        raise CostError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise CostError(f"{path} is not text: {error}") from None
    rows = dict[int, list[tuple[int, float]]]()
    for number, line in enumerate(lines, 1):
        if not line or (number == 1 and line[0].strip() == "rank"):
            continue
        rank, step, seconds = _row(path, number, line)
        rows.setdefault(rank, []).append((step, seconds))
    if not rows:
        raise CostError(f"{path} has no rows: write a line 'rank,step,seconds' for each step of each rank")
    for rank, found in sorted(rows.items()):
        if len(found) < FEWEST:
            raise CostError(
                f"{path}: rank {rank} has {len(found)} rows, which say too little of its slow steps; record {FEWEST} at least"
            )
    return Trace(tuple(tuple(seconds for _, seconds in sorted(rows[rank])) for rank in sorted(rows)))


def _row(path: Path, number: int, line: Sequence[str]) -> tuple[int, int, float]:
    if len(line) != 3:
        raise CostError(f"{path}, line {number}: must be rank,step,seconds, not {','.join(line)[:60]!r}")
    for name, read, text in (("rank", int, line[0]), ("step", int, line[1]), ("seconds", float, line[2])):
        try:
            fine = 0 <= read(text) < inf and (name != "seconds" or read(text) > 0)
        except ValueError:
            fine = False
        if not fine:
            least = "more than 0" if name == "seconds" else "a whole number, 0 or more"
            raise CostError(f"{path}, line {number}: {name} must be {least}, not {text!r}")
    return int(line[0]), int(line[1]), float(line[2])
