"""What is known to fail, and by which finding of "On GPUs". An entry whose test passes is an error: take it out.

Empty is what this table wants to be.
"""

from collections.abc import Container, Iterable
from typing import Any, NamedTuple

import pytest


class Known(NamedTuple):
    finding: int
    why: str
    test: str
    names: tuple[str, ...]  # of what it fails for


KNOWN: tuple[Known, ...] = ()


def cases(test: str, names: Iterable[str], always: Container[str] | None = None) -> list[Any]:
    """The names as a test's parameters; those that are known to fail are marked, and so are those not `always` tried."""
    slow = [pytest.mark.slow]
    return [
        pytest.param(name, marks=marks(test, name) + (slow if always is not None and name not in always else []))
        for name in names
    ]


def marks(test: str, name: str = "") -> list[Any]:
    found = [k for k in KNOWN if k.test == test and name in k.names]
    return [pytest.mark.xfail(strict=True, reason=f"finding {k.finding}: {k.why}") for k in found]
