"""Floor 7: recipes on trial: trained side by side on one workload, one network, the same data."""

from gossamer.bench.compare.launch import join, launch
from gossamer.bench.compare.plan import ComparePlan

__all__ = ["ComparePlan", "join", "launch"]
