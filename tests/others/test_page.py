"""The table of docs/others.md and the tests beside this file are of each other."""

import re
from pathlib import Path

HERE = Path(__file__).parent
ROW = re.compile(r"^\| .* \| (`[a-z_`, ]+`) \|$", re.M)


def test_every_row_has_a_test_and_every_test_a_row() -> None:
    page = (HERE.parents[1] / "docs" / "others.md").read_text()
    words = {word for row in ROW.findall(page) for word in re.findall(r"`([a-z_]+)`", row)}
    first = page[: page.index("\n## ")]  # the table of loops
    assert len(ROW.findall(page)) == len(re.findall(r"^\| ", first, re.M)) - 2  # all but the head and the rule below it
    files = [p for p in HERE.glob("test_*.py") if p.name != Path(__file__).name]
    tests = {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)}
    assert {w for w in words if not any(w in t for t in tests)} == set()
    assert {t for t in tests if not any(w in t for w in words)} == set()
