"""Floor 7: recipes on trial: trained side by side on one workload, one network, the same data."""

from gossamer.trial.launch import join, launch
from gossamer.trial.plan import Plan

__all__ = ["Plan", "join", "launch"]
