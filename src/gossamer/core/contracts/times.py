"""What ranks measure of their steps for a controller that decides by times, and what it asks for."""

from collections.abc import Sequence
from typing import Any, NamedTuple

NAN = float("nan")
NUMBERS = 3  # that are measured of one candidate


class CandidateCost(NamedTuple):
    """What a candidate's program costs on the largest block: seconds of processor, its bytes over dense's, and its requests for a block.

    All three are measured; `every` follows from the recipe. Where all ranks have averaged under it, `work` is the time of that.
    """

    work: float = NAN
    bytes: float = NAN
    requests: float = NAN
    every: float = 0.0  # steps of a round, after which models are averaged; 0: gradients are, at every step


class TimesDue(NamedTuple):
    """What a controller asks of a step: ranks exchange their last `rows` rows, each block is timed, candidates are run.

    Candidates are run by each rank alone, and then, with `sends`, by all ranks together. A row is a step, and under rounds of local steps the mean of a round's steps.
    """

    rows: int = 0
    times_blocks: bool = False
    measures_error: bool = False
    runs: Sequence[int] = ()  # numbers of the candidates
    sends: bool = False
    candidates: Sequence[Any] = ()  # recipes


class RankTimes(NamedTuple):
    """One rank's measurements, in seconds; NaN where there is none.

    >>> times = RankTimes([1.0], [0.5], [2.0], [0.1], [0.2], [CandidateCost(1.0, 0.5, 2.0)], 0.0, 0.0, 7.0)
    >>> RankTimes.of(times.numbers(), rows=1, candidates=1) == times
    True
    """

    steps: Sequence[float]
    waits: Sequence[float]  # of these seconds, those that the training loop waited for averages
    losses: Sequence[float]  # as reported by the training loop
    ready: Sequence[float]  # from a step's begin until each block's average could start
    sending: Sequence[float]  # of each block's average
    costs: Sequence[CandidateCost]
    latency: float  # of an average of one number
    error: float  # the mean relative compression error of all parameters
    machine: float  # a hash of this rank's host

    def numbers(self) -> list[float]:
        costs = [number for cost in self.costs for number in cost[:NUMBERS]]
        alone = [self.latency, self.error, self.machine]
        return [*self.steps, *self.waits, *self.losses, *costs, *alone, *self.ready, *self.sending]

    @staticmethod
    def of(numbers: Sequence[float], rows: int, candidates: int) -> "RankTimes":
        steps, waits, losses = (numbers[i * rows : (i + 1) * rows] for i in range(3))
        first = 3 * rows + NUMBERS * candidates
        costs = [CandidateCost(*numbers[i : i + NUMBERS]) for i in range(3 * rows, first, NUMBERS)]
        blocks = numbers[first + 3 :]
        half = len(blocks) // 2
        return RankTimes(steps, waits, losses, blocks[:half], blocks[half:], costs, *numbers[first : first + 3])
