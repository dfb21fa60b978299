"""Load balancing: how many samples, or local steps, each rank takes so that all finish at the same time."""

from collections.abc import Sequence
from math import isfinite

from gossamer.core.errors import GossamerError

WORTH = 0.1  # the relative saving of step time at which shares change


def divided(samples: int, seconds: Sequence[float], most: Sequence[int]) -> list[int]:
    """Divide `samples` among ranks by their seconds per sample: n_i is about S / seconds_i, at least 1, at most `most`.

    They sum to `samples`. One after the other goes to the rank that would then be done first, the lowest of equal ones, and so
    the last to be done is as early as it can be.

    >>> divided(12, [1.0, 2.0], [12, 12])
    [8, 4]
    >>> divided(12, [1.0, 2.0], [6, 12])
    [6, 6]
    """
    speeds = [1 / s for s in seconds]
    shares = [max(1, min(m, int(samples * v / sum(speeds)))) for v, m in zip(speeds, most, strict=True)]
    ranks = range(len(shares))
    while sum(shares) < samples:
        shares[min((r for r in ranks if shares[r] < most[r]), key=lambda r: ((shares[r] + 1) * seconds[r], r))] += 1
    while sum(shares) > samples:
        shares[max((r for r in ranks if shares[r] > 1), key=lambda r: (shares[r] * seconds[r], -r))] -= 1
    return shares


def step_seconds(shares: Sequence[int], seconds: Sequence[float]) -> float:
    """The seconds until the slowest rank is done."""
    return max(n * s for n, s in zip(shares, seconds, strict=True))


def planned(samples: int, seconds: Sequence[float], most: Sequence[int], now: Sequence[int]) -> list[int]:
    """The samples of each rank for these speeds; `now` if it sums to as many samples and others would hardly be faster.

    >>> planned(12, [1.0, 1.9], [12, 12], now=[8, 4])
    [8, 4]
    """
    new = divided(samples, seconds, most)
    stays = sum(now) == samples and all(n <= m for n, m in zip(now, most))
    return [*now] if stays and step_seconds(now, seconds) < (1 + WORTH) * step_seconds(new, seconds) else new


def local_steps(every: int, seconds: Sequence[float], now: Sequence[int]) -> list[int]:
    """How many of a round's `every` steps each rank takes, given the seconds of a step: the fastest rank takes all of them, and
    the others as many as fit into that time or a tenth more, one at least.

    Those of `now`, if others would hardly come to more steps a second, or if some rank has not been timed.

    >>> local_steps(8, [1.0, 1.05, 2.0], now=[8, 8, 8])
    [8, 8, 4]
    >>> local_steps(8, [1.0, 1.05, 1.9], now=[8, 8, 4])
    [8, 8, 4]
    """
    least = min(seconds)
    if least <= 0:
        return [*now]
    new = [max(1, min(every, int((1 + WORTH) * every * least / s))) for s in seconds]
    worth = sum(new) / step_seconds(new, seconds) > (1 + WORTH) * sum(now) / step_seconds(now, seconds)
    return new if worth else [*now]


def check(samples: int, seconds: float, most: int | None, size: int) -> None:
    """Raise GossamerError if what a rank reports of itself is invalid."""
    if samples < size:
        raise GossamerError(
            f"{samples} sample(s) for {size} ranks: each needs one at least; say samples={size} or more"
        )
    if not (isfinite(seconds) and seconds > 0):
        raise GossamerError(
            f"seconds must be what one sample takes this rank, a number above 0, got {seconds!r}; time a few batches, and divide"
        )
    if most is not None and most < 1:
        raise GossamerError(f"most must be at least 1 sample, got {most}; omit it if all samples fit into memory")
