"""What `auto` concludes from times: pure functions of numbers that are equal on all ranks.

Numbers of a rank whose clock lies (NaN, zero, negative) make a step unknown, and too few known steps make a window so: then
nothing is concluded from it.
"""

from collections.abc import Sequence
from math import comb, inf, isfinite, isnan
from statistics import linear_regression, median, stdev
from typing import NamedTuple

from gossamer.core.contracts.times import NAN, CandidateCost, RankTimes
from gossamer.costs.laws import FORWARD
from gossamer.costs.quantities import say_seconds

LEAST = 4  # known steps of a window from which its median says anything
CLEARLY = 1.5  # times as long as another, so that few steps tell the two apart
SLOW = 1.5  # a rank that computes so many times as long as the median of the others is named
# A step in which a rank does not wait for so many times its median had an evaluation or a checkpoint before it.
PAUSED = 3.0
SURE = 0.9  # confidence of a median's interval
NOISY = 2.0  # standard deviations by which a loss may lie above its trend


class WindowMedian(NamedTuple):
    """The median of a window's steps, and the interval in which it lies with 90 % confidence; NaN if it is not known.

    Of three or four steps it is their range (75 and 87 %).
    """

    low: float = NAN
    middle: float = NAN
    high: float = NAN

    @property
    def known(self) -> bool:
        return isfinite(self.middle)


class Timing(NamedTuple):
    """A window of all ranks: the slowest rank's steps, and what a step's time goes to."""

    steps: WindowMedian
    computing: float  # of the slowest rank
    waiting: float  # of the rank that waits least: for the network, and for nobody
    ready: Sequence[float]  # of each block: when the last rank could start its average
    sending: Sequence[float]  # of each block's average, once the last rank had started it
    latency: float
    slow: str  # names a rank that computes far longer than the others


def timing_of(times: Sequence[RankTimes], least: int = LEAST) -> Timing:
    """Combine all ranks' numbers; of fewer than `least` known steps there is no median."""
    pairs = [[_row(rank.steps[i], rank.waits[i]) for rank in times] for i in range(len(times[0].steps))]
    known = [[pair for pair in row if pair is not None] for row in pairs if None not in row]
    usual = _computing(known, len(times))
    known = [row for row in known if all(s - w <= PAUSED * c for (s, w), c in zip(row, usual))]
    computing = _computing(known, len(times))
    return Timing(
        median_of([max(seconds for seconds, _ in row) for row in known], least),
        max(computing),
        median(min(waited for _, waited in row) for row in known) if known else NAN,
        [max(map(_held, each)) for each in zip(*(rank.ready for rank in times))],
        [min(map(_held, each)) for each in zip(*(rank.sending for rank in times))],
        min(_held(rank.latency) for rank in times),
        _slow_rank(computing),
    )


def _computing(rows: Sequence[Sequence[tuple[float, float]]], ranks: int) -> list[float]:
    """The median seconds in which each rank did not wait."""
    return [median(row[r][0] - row[r][1] for row in rows) if rows else NAN for r in range(ranks)]


def costs_of(times: Sequence[RankTimes]) -> list[CandidateCost]:
    """Each candidate's cost on the rank on which it is the dearest."""
    return [CandidateCost(*(max(map(_held, each)) for each in zip(*ranks))) for ranks in zip(*(r.costs for r in times))]


def beyond_bytes(costs: Sequence[CandidateCost], seen: Timing, sizes: Sequence[int]) -> list[CandidateCost]:
    """Costs of which `work` was the time of a whole average: what it took beyond latencies and its bytes' share of dense's transfer.

    That is less than nothing where dense moves its bytes more slowly, as sums do over links that are as fast as memory.
    """
    if len(seen.sending) != len(sizes) or not sizes:
        return [cost._replace(work=NAN) for cost in costs]
    dense = seen.sending[max(range(len(sizes)), key=sizes.__getitem__)] - seen.latency
    return [cost._replace(work=cost.work - cost.requests * seen.latency - cost.bytes * dense) for cost in costs]


def _held(number: float) -> float:
    """Infinity for a number that is none, so that whatever rests on it is no good."""
    return number if isfinite(number) and number >= 0 else inf


def _row(seconds: float, waited: float) -> tuple[float, float] | None:
    fine = isfinite(seconds) and isfinite(waited) and seconds > 0 and 0 <= waited <= seconds
    return (seconds, waited) if fine else None


def median_of(values: Sequence[float], least: int = LEAST) -> WindowMedian:
    """The median, and the order statistics between which it lies with 90 % confidence.

    >>> median_of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    WindowMedian(low=2.0, middle=4.5, high=7.0)
    """
    count, found = len(values), sorted(values)
    if count < least:
        return WindowMedian()
    outside, tail = 0, 2.0**-count  # of a sign test: fewer than so many values lie on one side
    while outside + 1 < (count + 1) // 2 and 2 * (tail + comb(count, outside + 1) * 2.0**-count) <= 1 - SURE:
        outside += 1
        tail += comb(count, outside) * 2.0**-count
    return WindowMedian(found[outside], median(found), found[-1 - outside])


def _slow_rank(computing: Sequence[float]) -> str:
    if len(computing) < 2 or not all(map(isfinite, computing)):
        return ""
    slowest = max(range(len(computing)), key=computing.__getitem__)
    others = median(seconds for rank, seconds in enumerate(computing) if rank != slowest)
    if computing[slowest] <= SLOW * others:
        return ""
    return f"rank {slowest} computes {say_seconds(computing[slowest])} a step, the others {say_seconds(others)}"


# -- prediction ---------------------------------------------------------------------------------------------------------


def predicted(
    seen: Timing,
    sizes: Sequence[int],
    costs: Sequence[CandidateCost],
    now: CandidateCost | None = None,
    late: float = 0.0,
    cuts: Sequence[Sequence[int]] | None = None,
) -> list[float]:
    """Seconds a step, of dense and then of each candidate, from what was seen under `now` (None: under dense).

    A block's average takes the candidate's processor time, a latency for each of its requests, and dense's transfer times the
    candidate's share of bytes. Averages follow one another on the comm thread, each when its block is ready; the step goes on
    when the last is done. Under rounds of local steps they follow on a round's computing, once for all its steps. What the step
    takes besides was measured. `late` seconds of a slow rank's computing are left out.

    `sizes` are those of the blocks that were seen, `cuts` those that there would be under dense and each candidate, if others.
    """
    if len(seen.ready) != len(sizes) or not sizes or not seen.steps.known:
        return [NAN] * (1 + len(costs))
    under, cuts = now or DENSE, cuts or [sizes] * (1 + len(costs))
    largest = max(*cuts[0], 1)  # of dense, on which candidates were run
    shares = [size / largest for size in sizes]
    bare = [s - share * under.work - under.requests * seen.latency for s, share in zip(seen.sending, shares)]
    transfers = [max(seconds, 0.0) / max(under.bytes, 1e-9) for seconds in bare]
    ready, computing = [max(moment - late, 0.0) for moment in seen.ready], max(seen.computing - late, 0.0)

    def end(cost: CandidateCost, cut: Sequence[int]) -> float:
        """When the last average is done, counted from the step's begin; of rounds of local steps, the mean of their steps."""
        work = [size / largest * cost.work + cost.requests * seen.latency for size in cut]
        moves = [cost.bytes * seconds for seconds in _by_share(transfers, sizes, cut)]
        if cost.every:
            return computing + (sum(work) + sum(moves)) / cost.every
        clock = 0.0
        for moment, working, moving in zip(ready_by_share(ready, sizes, cut), work, moves, strict=True):
            clock = max(clock, moment) + working + moving
        return max(clock, computing)

    besides = seen.steps.middle - late - end(under, sizes)
    found = [end(cost, cut) + besides for cost, cut in zip((DENSE, *costs), cuts, strict=True)]
    return [seconds if isfinite(seconds) and seconds > 0 else NAN for seconds in found]


def _by_share(seconds: Sequence[float], then: Sequence[int], now: Sequence[int]) -> list[float]:
    """The time of each block, known of blocks of other sizes; the same where they are the same."""
    if [*then] == [*now]:
        return [*seconds]
    return [sum(seconds) * size / max(sum(then), 1) for size in now]


def ready_by_share(ready: Sequence[float], then: Sequence[int], now: Sequence[int]) -> list[float]:
    """When the gradients of blocks of these sizes would be ready in backward, known of blocks of other sizes.

    In between they come as evenly as elements do, and the first of them from a third of the time on, where backward begins.

    >>> ready_by_share([0.3, 0.6], then=[60, 40], now=[60, 20, 20])
    [0.3, 0.45, 0.6]
    >>> ready_by_share([0.6], then=[100], now=[50, 50])
    [0.4, 0.6]
    """
    if [*then] == [*now]:
        return [*ready]
    ends = [0.0, *(sum(then[: i + 1]) / max(sum(then), 1) for i in range(len(then)))]
    moments = [FORWARD * ready[-1], *ready]
    places = [sum(now[: i + 1]) / max(sum(now), 1) for i in range(len(now))]
    return [_between(place, ends, moments) for place in places]


def _between(place: float, ends: Sequence[float], moments: Sequence[float]) -> float:
    i = next((i for i in range(1, len(ends)) if ends[i] >= place - 1e-9), len(ends) - 1)
    part = (place - ends[i - 1]) / max(ends[i] - ends[i - 1], 1e-9)
    return moments[i - 1] + min(part, 1.0) * (moments[i] - moments[i - 1])


DENSE = CandidateCost(0.0, 1.0, 1.0)


def order(seconds: Sequence[float], gain: float, barred: Sequence[bool]) -> list[int]:
    """The candidates whose predicted step is below dense's, which comes first, by `gain`: the best first, numbered from 0."""
    dense, rest = seconds[0], seconds[1:]
    good = [i for i, s in enumerate(rest) if s <= (1 - gain) * dense and not barred[i]]  # false for NaN
    return sorted(good, key=lambda i: rest[i])


def holds(candidate: WindowMedian, dense: WindowMedian, gain: float) -> bool:
    """True if a candidate is faster than dense by `gain`, and the intervals of the medians part."""
    return candidate.middle <= (1 - gain) * dense.middle and candidate.high < dense.low


def is_clear(candidate: WindowMedian, dense: WindowMedian) -> bool:
    """True if each of a candidate's steps is so much shorter than dense's that dense need not be timed beside it."""
    return CLEARLY * candidate.high < dense.low


def differs(measured: float, expected: float) -> bool:
    """True if the two are known and differ by over a quarter."""
    return abs(measured - expected) > 0.25 * expected


def rises(before: Sequence[float], after: Sequence[float]) -> bool:
    """True if the mean loss after a change lies above the trend before it by more than its noise.

    The trend is the line through the losses before, at its end: as if it had not fallen any further. Losses that rose already,
    under trials, are judged by their mean. A loss that is no number any more is infinite.
    """
    past, later = [x for x in before if isfinite(x)], [x for x in after if isfinite(x)]
    if len(past) < 2 * LEAST or (not later and inf not in after):
        return False
    line = linear_regression(range(len(past)), past)
    noise = stdev(y - line.slope * x - line.intercept for x, y in enumerate(past))
    level = min(line.slope * (len(past) - 1) + line.intercept, sum(past) / len(past))
    return inf in after or sum(later) / len(later) > level + NOISY * noise


def mean_losses(times: Sequence[RankTimes]) -> list[float]:
    """Each step's mean loss over the ranks that told one."""
    told = [[x for x in row if not isnan(x)] for row in zip(*(rank.losses for rank in times))]
    return [sum(row) / len(row) if row else NAN for row in told]


# -- words ----------------------------------------------------------------------------------------------------------------


def say_choice(name: str, step: int, steps: WindowMedian, dense: WindowMedian, guess: float) -> str:
    took = f"{say_seconds(steps.middle)} a step, {say_seconds(dense.middle)} dense (predicted {say_seconds(guess)})"
    return f"auto: {name} from step {step}: {took}"


def say_dense(seen: Timing) -> str:
    return f"auto: dense is best here: it waits {say_seconds(seen.waiting)} of {say_seconds(seen.steps.middle)}"


def say_measured(name: str, steps: WindowMedian) -> str:
    return f"{name} {say_seconds(steps.middle)}"
