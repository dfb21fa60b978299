"""Floor 7: train several recipes side by side on one workload, one network and the same data."""

from gossamer.bench.compare.launch import join, launch
from gossamer.bench.compare.plan import ComparePlan

__all__ = ["ComparePlan", "join", "launch"]
