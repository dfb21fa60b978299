"""What is known to fail, and by which finding of "On GPUs". An entry whose test passes is an error: take it out.

Empty is what this table wants to be.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest


class Known(NamedTuple):
    finding: int
    why: str
    test: str
    names: tuple[str, ...]  # of what it fails for


KNOWN: tuple[Known, ...] = ()


def cases(test: str, names: Iterable[str]) -> list[Any]:
    """The names as a test's parameters; those that are known to fail are marked."""
    return [pytest.param(name, marks=marks(test, name)) for name in names]


def marks(test: str, name: str = "") -> list[Any]:
    found = [k for k in KNOWN if k.test == test and name in k.names]
    return [pytest.mark.xfail(strict=True, reason=f"finding {k.finding}: {k.why}") for k in found]
