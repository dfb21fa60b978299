"""What these tests share: workloads that are ready, or a reason to skip."""

from functools import cache
from pathlib import Path

import pytest

from gossamer.bench import workloads
from gossamer.bench.workloads import DataError, Workload

OFFLINE = ["lm", "lm-bytes", "lm-lstm", "logistic", "ridge"]
LARGE = ["fashion-resnet", "lm-bytes", "translate", "translate-rnn", "wiki-lm", "wiki-topics"]  # whose steps take long


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "data: fetches a package, and skips where it cannot")
    config.addinivalue_line("markers", "trains: takes steps or judges a whole set, which is slow for large workloads")


def every_workload(trains: bool) -> list[object]:
    """All names, those that need a download marked as such; of what trains, those that take long too."""

    def marks(name: str) -> list[pytest.MarkDecorator]:
        fetched = [] if name in OFFLINE else [pytest.mark.data]
        return [*fetched, pytest.mark.slow] if trains and name in LARGE else fetched

    return [pytest.param(n, marks=marks(n)) for n in workloads.names()]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """To be registered is to be tested."""
    if "workload" in metafunc.fixturenames:
        trains = metafunc.definition.get_closest_marker("trains") is not None
        metafunc.parametrize("workload", every_workload(trains), indirect=True)


@pytest.fixture
def workload(request: pytest.FixtureRequest) -> Workload:
    found = _ready(request.param)
    return found if isinstance(found, Workload) else pytest.skip(found)


@cache
def _ready(name: str) -> Workload | str:
    made = workloads.get(name)
    try:
        made.prepare()
    except DataError as error:
        return str(error)
    return made


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that nothing else uses."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("GOSSAMER_CACHE", str(folder))
    return folder
