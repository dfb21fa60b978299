"""Where a person reads: a terminal, or a pipe, in which lines must not be folded."""

from rich.console import Console

WIDE = 1000  # columns that no table of ours has


def console(stderr: bool = False) -> Console:
    """Colours and folding on a terminal only."""
    made = Console(stderr=stderr, highlight=False)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, width=WIDE)
