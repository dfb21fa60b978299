"""The fabric tests run at several world sizes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

Everywhere = Callable[..., list[Any]]


@pytest.fixture(params=[1, 2, 4])
def everywhere(request: pytest.FixtureRequest) -> Iterator[Everywhere]:
    """Calls a function on all ranks of a world of this size; a world of one needs no process group."""
    if request.param == 1:
        yield lambda fn, *args: [fn(0, 1, *args)]
    else:
        yield request.getfixturevalue(f"gang{request.param}").run
