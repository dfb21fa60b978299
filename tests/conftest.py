"""Settings for all tests, and gangs of processes that live as long as the session."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# Before torch is loaded, and for the processes that tests start: one thread each, or they fight for the cores.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).parent.parent))  # so that gangs find the functions of test modules

import pytest
import torch
from hypothesis import settings
from tests.gang import Gang

from gossamer.lab import available

# What a shell starts in the background ignores ctrl-C, and so would all that tests start and then interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
settings.register_profile("gossamer", derandomize=True, deadline=None)
settings.load_profile("gossamer")


COMMANDS = {"cli", "lab", "trial", "others"}  # packages whose tests start whole commands, or measure a network


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a lab where none can be made, and say why; mark what must not run side by side with its like."""
    reason = available()
    for item in items:
        if reason is not None and item.get_closest_marker("lab"):
            item.add_marker(pytest.mark.skip(reason=reason))
        if (kind := _kind(item)) is not None:
            item.add_marker(kind)


def _kind(item: pytest.Item) -> pytest.MarkDecorator | None:
    """What a test needs besides its own process; `make test` runs tests of one kind one after the other.

    Labs would share the cores that they measure, and so would ranks that are killed and others that must notice in time.
    Those who send work to a gang that is there already wait for it, and for nothing else.
    """
    commands = item.get_closest_marker("lab") or item.path.parent.name in COMMANDS
    if not commands and {"gang2", "gang4", "world"} & set(getattr(item, "fixturenames", ())):
        return pytest.mark.crews
    return pytest.mark.processes if commands or item.get_closest_marker("gang") else None


def _gang(size: int) -> Iterator[Gang]:
    gang = Gang(size)
    yield gang
    gang.close()


@pytest.fixture(scope="session")
def gang2() -> Iterator[Gang]:
    yield from _gang(2)


@pytest.fixture(scope="session")
def gang4() -> Iterator[Gang]:
    yield from _gang(4)
