"""What `auto` may choose unless told otherwise, and what speaks for it.

Written from docs/quality.md: recipes that average gradients at every step, keep no memory, and could not be told from dense, by
three seeds, on any workload there, neither at rates that a search found nor *at dense's rate*, which is what a change in mid-run
keeps. It shows no whole schedule of learning rates, since its runs end after 48 to 96 steps.
"""

from typing import NamedTuple


class AllowedRecipe(NamedTuple):
    """A recipe, how far it was from dense at dense's rate (mean difference and its 95 % interval) by workload, and its
    compression error.

    The error is the mean over parameters of |lost| / |gradient|, on four virtual ranks: the largest seen in 20 steps of
    `fashion` and 3 of `lm`. It depends on how a gradient is distributed, so a guard fires at twice as much.
    """

    recipe: str
    above_dense: dict[str, str]
    error: float
    needs_matrix: bool = False  # as the last layer, which it sends apart


TABLE = (
    AllowedRecipe("bf16", {"lm": "+0.000 [-0.000, +0.000]", "fashion": "-0.008 [-0.077, +0.061]"}, 0.0018),
    AllowedRecipe("int8", {"lm": "-0.000 [-0.000, -0.000]", "fashion": "+0.009 [-0.046, +0.063]"}, 0.012),
    AllowedRecipe("qsgd", {"lm": "+0.006 [-0.005, +0.017]", "fashion": "+0.015 [-0.030, +0.060]"}, 0.34),
    AllowedRecipe(
        "terngrad(last='qsgd')",
        {"lm": "+0.003 [-0.027, +0.032]", "fashion": "-0.007 [-0.065, +0.050]"},
        0.78,
        needs_matrix=True,
    ),
)
ALLOWED = tuple(row.recipe for row in TABLE)
ERRORS = {row.recipe: row.error for row in TABLE}
