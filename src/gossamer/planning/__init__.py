"""Counts the bytes that a recipe sends, without training.

First a dry run of the schedule on a model of one number finds its requests and their steps. Then each request
is run once, by one rank after the other, as if all others did the same. The exchanges run unchanged, on tensors of
full length; only encoding and decoding are left out where a wire's length is known without them.
"""

from gossamer.planning.bytes import Momenta, bytes_between, bytes_per_step
from gossamer.planning.dry_run import DryRun, span

__all__ = ["DryRun", "Momenta", "bytes_between", "bytes_per_step", "span"]
