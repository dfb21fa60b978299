"""The page of versions says what the pins say, and names every private name that is looked up."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()
SOURCE = ROOT / "src" / "gossamer"


def rows(head: str) -> list[list[str]]:
    """Cells of the table below a head, without their backticks."""
    section = PAGE.partition(f"## {head}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (.*) \|$", section, re.M)[2:]
    return [[cell.strip().strip("`") for cell in line.split(" | ")] for line in lines]


def pins() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    ours = [line for name in ("fast", "gpu", "accelerate", "hf", "lightning") for line in extras[name]]
    wanted = [line.partition(";")[0] for line in (*project["dependencies"], *ours)]
    return {name: f">={versions}" for name, versions in (line.split(">=") for line in wanted)}


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def test_the_page_asks_for_what_the_pins_ask_for() -> None:
    asked = {name: asks for name, asks, *_ in rows("Versions") if asks.startswith(">=")}
    assert asked == pins()


def test_versions_that_were_tried_are_versions_that_are_asked_for() -> None:
    for name, asks, lowest, newest, _ in rows("Versions"):
        assert numbers(lowest) <= numbers(newest), name
        if asks.startswith(">="):
            lower, _, upper = asks[2:].partition(",<")
            assert numbers(lower) <= numbers(lowest), name
            assert not upper or numbers(newest) < numbers(upper), name


def test_the_pages_of_trainers_say_the_same_versions() -> None:
    tried = {name: (lowest, newest) for name, _, lowest, newest, _ in rows("Versions")}
    told = [
        match.groups()
        for page in sorted((ROOT / "docs" / "trainers").glob("*.md"))
        for match in re.finditer(r"^\| (\w+) \| (\d[\d.]*) \| (\d[\d.]*) \|$", page.read_text(), re.M)
    ]
    assert len(told) > 5
    assert [row for row in told if tried[row[0]] != row[1:]] == []


@cache
def looked_up() -> set[tuple[str, str]]:
    """Every name that a module looks up by `private_name`, and the module."""
    found = set[tuple[str, str]]()
    texts = {path: path.read_text() for path in sorted(SOURCE.rglob("*.py"))}
    for path in (path for path, text in texts.items() if "private_name" in text):
        for node in ast.walk(ast.parse(texts[path])):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "private_name":
                name = node.args[1]
                assert isinstance(name, ast.Constant), f"{path}, line {node.lineno}: the name must be written out"
                found.add((str(name.value), path.relative_to(SOURCE).as_posix()))
    return found


def test_every_private_name_is_on_the_page() -> None:
    table = rows("Private names")
    named = {(part, module) for name, module, _ in table for part in name.split(".")}
    assert sorted(looked_up() - named) == []
    assert [name for name, module, _ in table if (name.rpartition(".")[2], module) not in looked_up()] == []


def test_every_private_name_of_numba_is_on_the_page() -> None:
    tree = ast.parse((SOURCE / "kernels" / "cpu" / "compile.py").read_text())
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}  # of getattr
    section = PAGE.partition("\n`kernels/cpu/compile.py` ")[2].partition("\n\n")[0]
    assert {*re.findall(r"`(_\w+)`", section)} == {name for name in used - own if re.fullmatch(r"_[a-z]\w*", name)}
