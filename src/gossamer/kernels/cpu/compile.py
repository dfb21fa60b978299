"""Compiles all Numba loops with the same options."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Rows = Bytes  # two dimensions: (blocks, width)
Blocks = Bytes  # three dimensions: (blocks, rows, width)
Stack = Floats  # three dimensions: (blocks, rows, width)

P = ParamSpec("P")
R = TypeVar("R")


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles for this host without fast-math: results must not depend on how a loop was vectorised.

    To divide by zero is no error, as it is none in torch; loops that would look for it are not vectorised.
    """
    return cast(Callable[P, R], numba.njit(nogil=True, cache=True, error_model="numpy")(function))


def reduction(function: Callable[P, R]) -> Callable[P, R]:
    """Like `kernel`, but the additions of a sum may be reordered, in a way that is fixed on one host."""
    return cast(Callable[P, R], numba.njit(nogil=True, cache=True, fastmath={"reassoc"})(function))
