"""Where gossamer can be used: one table, which the front pages show, and each row of which a test runs."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MARKED = re.compile(r"<!-- table -->\n(.*?)<!-- end -->", re.S)


def table() -> str:
    found = MARKED.search((DOCS / "where.md").read_text())
    assert found is not None
    return found[1]


def rows() -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table().splitlines()[2:]]


def test_the_front_page_of_the_repository_shows_the_same_table() -> None:
    assert re.sub(r"\]\((?!\w+:)", "](docs/", table()) in (ROOT / "README.md").read_text()


def test_the_front_page_of_the_site_includes_it() -> None:
    index = (DOCS / "index.md").read_text()
    assert '```{include} where.md\n:start-after: "<!-- table -->"\n:end-before: "<!-- end -->"\n```' in index


def test_each_row_links_a_page_and_names_tests_that_are_there() -> None:
    assert len(rows()) >= 5
    for name, line, page, tests in rows():
        assert line, name
        assert re.search(r"\]\([\w/]+\.md(#[\w-]+)?\)", page), name
        for test in re.findall(r"`(tests/[\w/]+\.py)`", tests):
            assert (ROOT / test).is_file(), f"{name}: {test}"
        assert "`tests/" in tests or tests.startswith("as "), name
