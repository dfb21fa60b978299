"""Count sketches: a vector as a small table of sums, from which any element can be estimated.

A row of the table has `columns` cells. The vector is cut into layers of as many elements, and every row turns each layer
round by a random number of places, gives each of its elements a random sign, and adds all layers up. So elements of one
layer never meet in a cell, and elements of two do with a chance of one in `columns`, independently in every row: all that
a count sketch asks of its hash. Cells are added layer after layer, in the same order everywhere, by loops that read memory
as it lies; there is nothing to scatter and no atomic sum.
"""

from torch import Tensor

from gossamer.core.rng import Key
from gossamer.kernels.backends import twin
from gossamer.kernels.layout import Turns, require_count, require_vector


def sketch_encode(x: Tensor, rows: int, columns: int, key: Key) -> Tensor:
    """The (rows, columns) table of a vector; tables of one key add up to that of the vectors' sum.

    A number that is not finite leaves a cell in every row that is not. Reads 4 bytes per element, and reads and writes 4 per
    element and row in the table, which had better fit into a cache.
    """
    require_vector("x", x)
    table = x.new_zeros(_shape(x.numel(), rows, columns))
    if x.numel():
        twin("sketch", "add", x.device)(x, Turns(x.numel(), rows, columns, key), table)
    return table


def sketch_estimate(table: Tensor, n: int, key: Key, out: Tensor | None = None) -> Tensor:
    """Estimate the n elements of a table, each as the median of the rows' estimates; for finite tables only.

    They are written to `out`, if that is given.

    Reads 4 bytes per element and row, and writes 4 per element.
    """
    rows, columns = _shape(n, *table.shape)
    require_vector("table", table.view(-1))
    into = table.new_empty(n) if out is None else out
    require_vector("out", into)
    require_count("out", into, n)
    if n:
        twin("sketch", "estimate", table.device)(table, Turns(n, rows, columns, key), into)
    return into


def _shape(n: int, rows: int, columns: int) -> tuple[int, int]:
    if rows < 1 or rows % 2 == 0 or columns < 1:
        raise ValueError(f"a sketch has an odd number of rows and at least one column, got {rows} and {columns}")
    if Turns(n, rows, columns, (0, 0)).hashes >= 2**32:
        raise ValueError(
            f"{rows} rows of {columns} columns for {n} elements need more random numbers than 32 bits can count; use more columns"
        )
    return rows, columns
