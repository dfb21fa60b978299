"""Prose keeps to 120 columns, so that two versions can be compared on a screen; tables and code have their own lines."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST = 120
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "SECURITY", "CONTRIBUTING")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "launch").glob("*.md")),
]


def prose(page: Path) -> list[str]:
    code, out = False, list[str]()
    for line in page.read_text().splitlines():
        if line.lstrip().startswith("```"):
            code = not code
        elif not code and not line.lstrip().startswith(("|", "!", "<!--", "[")):
            out.append(line)
    return out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_prose_keeps_to_its_columns(page: Path) -> None:
    assert [line for line in prose(page) if len(line) > MOST] == []
