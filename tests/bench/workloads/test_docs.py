"""The page says what is there, and its code runs."""

import re
from pathlib import Path

from gossamer.bench import workloads
from gossamer.bench.workloads import contract

PAGE = (Path(__file__).parents[3] / "docs" / "workloads.md").read_text()


def test_every_workload_is_on_the_page() -> None:
    for name in workloads.names():
        assert PAGE.count(f"`{name}`") >= 2, name


def test_its_code_runs() -> None:
    before = workloads.names()
    space = dict[str, object]()
    try:
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(block, space)
        own = workloads.get("parity")
        assert own.evaluate(own.model()) > 0
    finally:
        contract._workloads.pop("parity", None)
    assert workloads.names() == before
