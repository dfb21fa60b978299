"""Dense gradients, in full precision or in 16 bits."""

from gossamer.codecs import BF16, FP16, FP32
from gossamer.exchanges import AllReduced, Scatter
from gossamer.recipe import Recipe, preset

DENSE = AllReduced(FP32())


@preset
def allreduce() -> Recipe:
    """Full gradients in one all-reduce, as DDP does: the baseline.

    Use: on links so fast that the all-reduce hides behind backward, and as the baseline of every comparison: nothing is lost.

    Not for: slower links: four hosts at 200 Mbit/s waited for the all-reduce during nine tenths of each step.

    Paper: none; the baseline.
    """
    return Recipe(DENSE)


@preset
def bf16() -> Recipe:
    """Gradients in bfloat16, summed in float32.

    Use: below about 10 Gbit/s, as the first thing to try: half the bytes, nothing to tune, and next to no loss.

    Not for: links below 1 Gbit/s, where half the bytes are still too many, nor ranks on one machine, where the conversion
    costs as much time as it saves.

    Paper: none; half the bytes of full precision.
    """
    return Recipe(Scatter(BF16()))


@preset
def fp16() -> Recipe:
    """Gradients in float16, summed in float32.

    Use: in place of `bf16` where three more bits of precision matter and gradients stay small.

    Not for: gradients beyond 65504, which a large loss scale can cause: they become inf, and the step is skipped.

    Paper: none; half the bytes of full precision.
    """
    return Recipe(Scatter(FP16()))
