"""What these tests share: workloads that are ready, or a reason to skip."""

from functools import cache
from pathlib import Path

import pytest

from gossamer import workloads
from gossamer.workloads import DataError, Workload

OFFLINE = ["lm", "lm-bytes", "lm-lstm", "logistic", "ridge"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "data: fetches a package, and skips where it cannot")


def every_workload() -> list[object]:
    """All names, those that need a download marked as such."""
    return [n if n in OFFLINE else pytest.param(n, marks=pytest.mark.data) for n in workloads.names()]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """To be registered is to be tested."""
    if "workload" in metafunc.fixturenames:
        metafunc.parametrize("workload", every_workload(), indirect=True)


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
