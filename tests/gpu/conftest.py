"""What was seen is kept for all tests of a session: every plan is run once."""

from collections.abc import Iterator

import pytest
from tests.gpu.loops import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()
