"""What `auto` may choose unless told otherwise, and what speaks for it.

Written from docs/quality.md: recipes that average gradients at every step, keep no memory, and could not be told from dense, by
three seeds, on any workload there. Each was trained at the rate that a search found for it, and dense at its own. So the table
does not show that they train as well *at dense's rate*, which is what a change in mid-run keeps; nor a whole schedule of
learning rates, since its runs end after 48 to 96 steps. `qsgd` had buckets of 512 there, and has less noise with its 128.
"""

from typing import NamedTuple


class AllowedRecipe(NamedTuple):
    """A recipe, how far it was from dense (mean difference and its 95 % interval) by workload, and its compression error.

    The error is the mean over parameters of |lost| / |gradient|, on four virtual ranks: the largest seen in 20 steps of
    `fashion` and 3 of `lm`. It depends on how a gradient is distributed, so a guard fires at twice as much.
    """

    recipe: str
    above_dense: dict[str, str]
    error: float


TABLE = (
    AllowedRecipe("bf16", {"lm": "+0.000 [-0.000, +0.000]", "fashion": "-0.007 [-0.027, +0.014]"}, 0.0018),
    AllowedRecipe("int8", {"lm": "-0.000 [-0.000, -0.000]", "fashion": "-0.019 [-0.070, +0.033]"}, 0.012),
    AllowedRecipe("qsgd", {"lm": "+0.014 [-0.024, +0.051]", "fashion": "-0.015 [-0.056, +0.026]"}, 0.34),
)
ALLOWED = tuple(row.recipe for row in TABLE)
ERRORS = {row.recipe: row.error for row in TABLE}
