"""Settings for all tests, and gangs of processes that live as long as the session."""

import atexit
import gc
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that gangs find the functions of test modules
import tests.loading  # noqa: F401

# Before torch is loaded, and for the processes that tests start: one thread each, or they fight for the cores.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
# Images for containers forbid bytecode; then each of hundreds of processes would compile all of our modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
import torch
from hypothesis import settings
from tests.gang import Gang

from gossamer.bench.lab import available

sys.dont_write_bytecode = False

_TESTS, _END_AT_ONCE = os.getpid(), os._exit


def _end_at_once(code: int) -> NoReturn:
    """What ends its process at once would end the tests without a word, and their exit code would be a good one."""
    if os.getpid() == _TESTS:
        raise AssertionError(f"os._exit({code}) was called in the process of the tests")
    _END_AT_ONCE(code)


os._exit = _end_at_once

# What a shell starts in the background ignores ctrl-C, and so would all that tests start and then interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
# A mistake in a loop shows in one example of a few; what one in a hundred shows is for `make test-all`.
EXAMPLES = 100 if os.environ.get("GOSSAMER_WIDE") == "1" else 40
settings.register_profile("gossamer", derandomize=True, deadline=None, max_examples=EXAMPLES)
settings.load_profile("gossamer")


collect_ignore = [
    "warm.py",
    "bench/compare/programs",
    "integrations/scripts",
    "lean",
    "trainers/scripts",
]  # they do something where they are imported

TESTS = Path(__file__).parent
CREWS, JUDGES = {"gang2", "gang3", "gang4", "gang_of", "everywhere"}, {"world", "nursery"}
# Packages whose tests start whole commands, and do not always say so.
COMMANDS = {"lab", "compare"}
TRAINERS = "trainers"  # a package whose tests load the libraries of others, which takes seconds for each rank
# Words without which a file has no test of a kind; so that the lane of that kind need not load it. Any file may compute.
WORDS = {"crews": CREWS, "judges": JUDGES, "ranks": {"mark.gang"}, "commands": {"shell"}, "labs": {"mark.lab"}}
LAWS = "laws"  # a package of tests that compute so much that they have a lane of their own
# Packages of which the tests that compute make a lane: with the others it would take longer than all else.
EARLY, COMPUTES = "computes_early", {"bench", "codecs", "controllers", "core", "docs"}
KINDS = (*WORDS, TRAINERS, LAWS, EARLY, "computes")


class _Lanes:
    """What a lane of `make test` leaves unread: most files have tests that compute, and no others.

    A plug-in of its own, since a hook of this file alone would not be asked about the examples in `src`.
    """

    @staticmethod
    def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
        lane = config.getoption("markexpr").partition(" ")[0]
        tests = collection_path.suffix == ".py" and collection_path.name != "conftest.py"
        return True if tests and lane in KINDS and not _may_hold(collection_path, lane) else None


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Lanes(), "lanes")


@cache
def _may_hold(file: Path, kind: str) -> bool:
    if kind == TRAINERS:
        return file.parent.name == TRAINERS and _may_hold(file, "ranks")
    if kind not in WORDS:
        return _computing(file) == kind
    if kind == "commands" and file.parent.name in COMMANDS:
        return True
    if not file.is_relative_to(TESTS):
        return False  # examples of docstrings take no fixtures
    return re.search(rf"\b({'|'.join(map(re.escape, WORDS[kind]))})\b", file.read_text(encoding="utf-8")) is not None


def _computing(file: Path) -> str:
    """The lane of a file's tests that need nothing but their own process."""
    if file.parent.name == LAWS:
        return LAWS
    package = file.relative_to(TESTS).parts[0] if file.is_relative_to(TESTS) else "core"  # examples of docstrings
    return EARLY if package in COMPUTES else "computes"


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end: they need not be looked through with whatever tests leave behind.

    And that less often than by default, which takes a tenth of the time of small simulations.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)  # some libraries count what is left of them in the end
    gc.set_threshold(10_000)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a lab where none can be made, and say why; mark what a test needs besides its own process."""
    reason = available()
    for item in items:
        if reason is not None and item.get_closest_marker("lab"):
            item.add_marker(pytest.mark.skip(reason=reason))
        kind = _kind(item)
        if kind.name in WORDS and not _may_hold(item.path, kind.name):
            words = " or ".join(sorted(WORDS[kind.name]))
            raise pytest.UsageError(
                f"{item.nodeid} is one of `{kind.name}`, whose lane skips its file: name {words} there"
            )
        item.add_marker(kind)


def _kind(item: pytest.Item) -> pytest.MarkDecorator:
    """What `make test` runs one after the other, and side by side with other kinds.

    Labs would share the links and the cores that they measure. Those who send work to a gang that is there already wait
    for it, and for nothing else. All others start processes: as a user starts commands, or ranks that are killed, while
    others must notice in time.
    """
    fixtures = set(getattr(item, "fixturenames", ()))
    if item.get_closest_marker("lab"):
        return pytest.mark.labs
    if fixtures & JUDGES:
        return pytest.mark.judges
    if fixtures & CREWS:
        return pytest.mark.crews
    if "shell" in fixtures or item.path.parent.name in COMMANDS:
        return pytest.mark.commands
    if item.get_closest_marker("gang"):
        return pytest.mark.trainers if item.path.parent.name == TRAINERS else pytest.mark.ranks
    return getattr(pytest.mark, _computing(item.path))


def _gang(size: int) -> Iterator[Gang]:
    gang = Gang(size)
    yield gang
    gang.close()


@pytest.fixture(scope="session")
def gang2() -> Iterator[Gang]:
    yield from _gang(2)


@pytest.fixture(scope="session")
def gang3() -> Iterator[Gang]:
    yield from _gang(3)


@pytest.fixture(scope="session")
def gang4() -> Iterator[Gang]:
    yield from _gang(4)


@pytest.fixture
def gang_of(request: pytest.FixtureRequest) -> Callable[[int], Gang]:
    """The gang of two, three or four ranks, for a test whose size is a parameter."""
    return lambda size: request.getfixturevalue(f"gang{size}")
