"""Where a person reads: a terminal, or a pipe, in which lines must not be folded."""

from rich.console import Console

WIDE = 1000  # columns that no table of ours has
NARROW = 80  # below, a table would lose its letters; a terminal that is narrower folds lines by itself


def console(stderr: bool = False) -> Console:
    """Colours and folding on a terminal only."""
    made = Console(stderr=stderr, highlight=False)
    if made.is_terminal and made.width >= NARROW:
        return made
    return Console(stderr=stderr, highlight=False, width=NARROW if made.is_terminal else WIDE)


def is_lively(stderr: bool = False) -> bool:
    """Whether rows can be redrawn in place: not in a pipe, nor where lines fold or the cursor cannot go back."""
    made = Console(stderr=stderr)
    return made.is_terminal and not made.is_dumb_terminal and made.width >= NARROW
