"""Consoles for a terminal, or for a pipe, in which lines are not wrapped; and tables of numbers."""

from rich.console import Console
from rich.table import Table

WIDE = 1000  # columns; wider than all our tables
NARROW = 80  # columns; rich would cut letters of a table below it, so a narrower terminal wraps lines itself
LEAST = 12  # columns that a name has at least


def console(stderr: bool = False) -> Console:
    """A console with colours and wrapping on a terminal only."""
    made = Console(stderr=stderr, highlight=False)
    if made.is_terminal and made.width >= NARROW:
        return made
    return Console(stderr=stderr, highlight=False, width=NARROW if made.is_terminal else WIDE)


def columns(*heads: str) -> Table:
    """A table without lines, of a name, which may be folded, and numbers, which are not broken."""
    made = Table(box=None, pad_edge=False)
    for i, head in enumerate(heads):
        made.add_column(head, justify="right" if i else "left", no_wrap=i > 0, overflow="fold")
    return made


def fits(screen: Console, table: Table) -> bool:
    """True if all numbers have room. Where they have none, rich would cut them."""
    whole = screen.measure(table, options=screen.options.update(max_width=WIDE)).maximum
    return whole - max([LEAST, *map(len, map(str, table.columns[0].cells))]) + LEAST <= screen.width


def print_table(screen: Console, table: Table) -> None:
    """Print a table. If it does not fit, heads are broken and gaps are small; and else the terminal breaks lines."""
    if not fits(screen, table):
        table.collapse_padding = True
        for column in table.columns:
            column.header = str(column.header).replace(" ", "\n")
    if not fits(screen, table):
        screen.width = WIDE
    screen.print(table)


def is_lively(stderr: bool = False) -> bool:
    """True if rows can be redrawn in place: not in a pipe, a dumb terminal, or a narrow one."""
    made = Console(stderr=stderr)
    return is_watched(made) and made.width >= NARROW


def is_watched(made: Console) -> bool:
    """True if lines can be redrawn: FORCE_COLOR makes a terminal of a pipe too, and would fill a CI's log with frames."""
    return made.is_terminal and not made.is_dumb_terminal and made.file.isatty()
