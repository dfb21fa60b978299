"""Forecasts of a positive number: extrapolate it as a power of time or exponentially."""

from math import log, sqrt
from typing import NamedTuple

import numpy as np
import torch

from gossamer.controllers.allocation import Numbers
from gossamer.core.bucket import State

FEWEST = 3  # points, before anything is believed in: older ones count less, so that there are half as many as steps
DOUBT = 1.0  # of a logarithm in the end, so a factor of e, within which a forecast is one
CLEAR = 3.0  # by how much more likely one law must be than the other, as a logarithm
EXACT = 1e-8  # variance below which points lie on a line


class Law(NamedTuple):
    """A fitted line: log(value) over log(time) (a power law) or over time (exponential)."""

    slope: float
    power: bool  # of time; else exponential
    variance: float  # of a point around it
    error: float  # of the slope

    def over(self, since: float, until: Numbers) -> Numbers:
        """Change of log(value) between two times."""
        return self.slope * (np.log(until / since) if self.power else until - since)


def forecast(steps: int, step: int, value: float, state: State) -> Law | None:
    """Add a step's value to all values seen in a run of so many steps; return a power law or an exponential, whichever fits.

    There is no forecast (None) from few points, where the end of the line is uncertain by more than a factor of e, and where
    both laws are likely and end further apart than that. All is kept in `state`. Do not pass running averages: they hide how
    fast the value falls.
    """
    sums = np.array(state["trends"].tolist()) if "trends" in state else np.zeros((2, 6))
    if value > 0:
        y = log(value)
        sums = (1 - 1 / step) * sums + np.array([[1.0, x, y, x * x, x * y, y * y] for x in (log(step), step / steps)])
    state["trends"] = torch.from_numpy(sums)
    return _judged(steps, step, _law(sums[0], 1.0, True), _law(sums[1], steps, False))


def _law(sums: Numbers, unit: float, power: bool) -> Law | None:
    """The line through all points, weighted; times are in this unit."""
    n = float(sums[0])
    if n < FEWEST:
        return None
    _, x, y, xx, xy, yy = (float(s) for s in sums / n)
    spread = xx - x * x
    if spread <= 0:
        return None
    slope = (xy - x * y) / spread
    variance = max((yy - y * y - slope * (xy - x * y)) * n / (n - 2), EXACT)
    return Law(slope / unit, power, variance, sqrt(variance / (n * spread)) / unit)


def _judged(steps: int, step: int, *laws: Law | None) -> Law | None:
    found = sorted((law for law in laws if law is not None), key=lambda law: law.variance)
    if len(found) < 2:
        return None
    best, other = found
    end = np.array([float(steps)])
    reach = float(best._replace(slope=1.0).over(step, end)[0])
    apart = abs(float((best.over(step, end) - other.over(step, end))[0]))
    likelier = step / 4 * log(other.variance / best.variance)
    if best.error * reach > DOUBT or (likelier < CLEAR and apart > DOUBT):
        return None
    return best
