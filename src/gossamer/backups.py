"""Finds the best number of backup workers from measured step times."""

from collections.abc import Sequence
from typing import NamedTuple

from gossamer.core.errors import RecipeError
from gossamer.core.parts import require


class Backups(NamedTuple):
    """A plan: wait for all but `backups` of the ranks, and get `gain` times as many gradients a second as by waiting for all.

    Step times were fitted by `constant` + an exponential of mean `tail`. `seconds` is how long a step then takes, and
    `measured` the gain in the times as they were measured, if any were.
    """

    backups: int
    gain: float
    seconds: float
    constant: float
    tail: float
    measured: float | None = None

    @property
    def recipe(self) -> str:
        return f"backup({self.backups})" if self.backups else "allreduce"


def expected(ranks: int, backups: int, constant: float, tail: float) -> float:
    """The expected time of the fastest `ranks - backups` ranks: constant + tail (H_ranks - H_backups), H_n = 1 + 1/2 + ... + 1/n.

    >>> round(expected(100, 4, 1.0, 1.0), 3)
    4.104
    """
    return constant + tail * sum(1 / n for n in range(backups + 1, ranks + 1))


def plan(ranks: int, constant: float, tail: float) -> Backups:
    """The plan whose number of backups b maximises (ranks - b) / expected seconds, with at least two gradients a step.

    >>> found = plan(100, constant=1.0, tail=1.0)
    >>> found.backups, round(found.gain, 2)
    (31, 1.98)
    """
    require(ranks >= 1, f"plan: ranks must be at least 1, got {ranks}")
    require(constant >= 0 and tail >= 0, f"plan: times must not be negative, got {constant} and {tail}")
    require(constant + tail > 0, "plan: steps that take no time need no backups")
    rates = [(ranks - b) / expected(ranks, b, constant, tail) for b in range(max(ranks - 1, 1))]
    best = max(range(len(rates)), key=rates.__getitem__)
    return Backups(best, rates[best] / rates[0], expected(ranks, best, constant, tail), constant, tail)


def recommend(seconds: Sequence[Sequence[float]]) -> Backups:
    """The best plan for measured times: a row for each step, with every rank's seconds of computing.

    All times are taken for draws of one shifted exponential: with n of them, of least value l and mean m, its tail is
    (m - l) n / (n - 1), and its constant l - tail / n. `measured` needs no such law: it is the gain in these very rows.

    >>> recommend([[1.0, 1.2, 2.0, 4.0], [1.1, 3.0, 1.0, 1.5]]).backups
    1
    """
    times = [t for row in seconds for t in row]
    sizes = {len(row) for row in seconds}
    if len(sizes) != 1 or len(times) < 2 or not all(0 < t < float("inf") for t in times):
        raise RecipeError(
            f"recommend: a row of positive seconds for each step, with one number for every rank; got {len(seconds)} rows of "
            f"{sorted(sizes)} numbers"
        )
    (ranks,), least, n = sizes, min(times), len(times)
    tail = (sum(times) / n - least) * n / (n - 1)
    found = plan(ranks, max(least - tail / n, 0.0), tail)
    steps = [[sorted(row)[ranks - 1 - b] for row in seconds] for b in (0, found.backups)]
    measured = (ranks - found.backups) * sum(steps[0]) / (ranks * sum(steps[1]))
    return found._replace(measured=measured)
