"""What was seen is kept for all tests of a session: every plan is run once."""

from collections.abc import Iterator

import pytest
from tests.gpu.loops import World
from tests.gpu.nursery import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def world(nursery: Nursery) -> World:
    return World(nursery)
