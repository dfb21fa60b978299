"""How long an emulated accelerator computes: a constant, or a law with a draw for each rank and step."""

import math
import random
import re
from dataclasses import dataclass
from typing import Literal, final

from gossamer.bench.workloads.errors import WorkloadError

_TIME = r"(\d{1,7}(?:\.\d{1,6})?)(ms|s)"
_FORM = re.compile(rf"{_TIME}(?: +lognormal +(\d{{0,3}}\.?\d{{1,6}})| +exponential +{_TIME})?")
SHORTEST, LONGEST = 0.001, 60.0  # seconds
WIDEST = 2.0  # sigma of a lognormal law; there, one draw in six is longer than the mean
TAKES = "--compute takes a time such as '150ms' or '0.3s', '150ms lognormal 0.2', or '150ms exponential 30ms'"

Law = Literal["constant", "lognormal", "exponential"]


@final
@dataclass(frozen=True)
class ComputeTime:
    """Seconds of forward and backward together, by law.

    - `constant`: `seconds`, always.
    - `lognormal`: of mean `seconds`; `spread` is the deviation of its logarithm.
    - `exponential`: `seconds` at least, and on top an exponential draw of mean `spread` seconds.

    >>> ComputeTime.of("150ms"), ComputeTime.of("1s exponential 300ms").mean
    (ComputeTime(seconds=0.15, law='constant', spread=0.0), 1.3)
    >>> ComputeTime.of("150ms").at(rank=1, step=7)
    0.15
    """

    seconds: float
    law: Law = "constant"
    spread: float = 0.0

    @staticmethod
    def of(text: str) -> "ComputeTime":
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise WorkloadError(f"{TAKES}, not {text[:40]!r}")
        number, unit, sigma, rest, rest_unit = found.groups()
        seconds = _seconds(number, unit)
        if not SHORTEST <= seconds <= LONGEST:
            raise WorkloadError(f"--compute must be between 1ms and {LONGEST:.0f}s, not {number}{unit}")
        if sigma is not None:
            if not 0 < float(sigma) <= WIDEST:
                raise WorkloadError(f"--compute: lognormal takes a sigma above 0 and up to {WIDEST:g}, not {sigma}")
            return ComputeTime(seconds, "lognormal", float(sigma))
        if rest is not None:
            if not 0 < _seconds(rest, rest_unit) <= LONGEST:
                raise WorkloadError(
                    f"--compute: exponential takes a mean above 0 and up to {LONGEST:.0f}s, not {rest}{rest_unit}"
                )
            return ComputeTime(seconds, "exponential", _seconds(rest, rest_unit))
        return ComputeTime(seconds)

    @property
    def mean(self) -> float:
        return self.seconds + (self.spread if self.law == "exponential" else 0.0)

    def at(self, rank: int, step: int, seed: int = 0) -> float:
        """Seconds of one rank in one step; the same for every recipe."""
        if self.law == "constant":
            return self.seconds
        dice = random.Random(f"{seed} {rank} {step} compute")
        if self.law == "lognormal":
            return self.seconds * math.exp(dice.gauss(-self.spread * self.spread / 2, self.spread))
        return self.seconds + dice.expovariate(1 / self.spread)


def _seconds(number: str, unit: str) -> float:
    return float(number) / (1000 if unit == "ms" else 1)
