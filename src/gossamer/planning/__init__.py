"""Floor 6: what a recipe sends, counted without training.

First the schedule is rehearsed on a model of one number, to see when it asks for what. Then each thing that it asks for
is done once, by one rank after the other, as if all others did what it does. The exchanges run as they are, on tensors of
full length; only encoding and decoding are left out where a wire's length is known without them.
"""

from gossamer.planning.bytes import bytes_between, bytes_per_step
from gossamer.planning.dry_run import DryRun, span

__all__ = ["DryRun", "bytes_between", "bytes_per_step", "span"]
