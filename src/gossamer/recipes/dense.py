"""Every gradient, in full or in 16 bits."""

from gossamer.codecs import BF16, FP16, FP32
from gossamer.exchanges import AllReduced, Scatter
from gossamer.recipe import Recipe, preset

DENSE = AllReduced(FP32())


@preset
def allreduce() -> Recipe:
    """Every gradient, in full: what DDP does, and the yardstick for all else.

    Use: on links so fast that the all-reduce hides behind backward, and as the baseline of every comparison: it
    loses nothing.

    Not for: links on which it does not hide. Four hosts at 200 Mbit/s spent nine tenths of each step waiting for
    it.

    Paper: none; the baseline.
    """
    return Recipe(DENSE)


@preset
def bf16() -> Recipe:
    """Gradients in 16-bit brain floats, summed in float32.

    Use: below about 10 Gbit/s, as the first thing to try: half the bytes, nothing to tune, and next to no loss.

    Not for: links below 1 Gbit/s, which need more than half, nor ranks on one machine, where converting costs what
    it saves.

    Paper: none; half the bytes of full precision.
    """
    return Recipe(Scatter(BF16()))


@preset
def fp16() -> Recipe:
    """Gradients in half precision, summed in float32.

    Use: in place of `bf16` where three more bits of precision matter and gradients stay small.

    Not for: gradients beyond 65504, to which a large loss scale is enough: they become inf, and the step is
    skipped.

    Paper: none; half the bytes of full precision.
    """
    return Recipe(Scatter(FP16()))
