"""Every recipe text that the pages show can be read, and those that they show as refused are refused."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from gossamer.core.errors import GossamerError
from gossamer.core.parts import Part, parse, registry
from gossamer.recipe import Recipe, known_presets

ROOT = Path(__file__).parents[2]
MADE = ROOT / "docs" / "parts"  # of docstrings
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if MADE not in p.parents)]
SOURCES = sorted((ROOT / "src" / "gossamer").rglob("*.py"))
SPAN = re.compile(r"(`+)(.+?)\1", re.S)
FENCE = re.compile(r"^```.*?^```", re.S | re.M)
QUOTED = re.compile(r"\"([^\"\n]+)\"|'([^'\n]+)'")
DOUBLE = re.compile(r"\"([^\"\n]+)\"")
REFUSED = {"allreduce(fp32()) + gather(qsgd())"}  # shown as what is refused


def spelt(page: Path) -> Iterator[str]:
    """Code within a sentence, and what is quoted in a listing or within such code."""
    text = page.read_text()
    if page.suffix == ".py":
        nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
        text = "\n".join(line for n in nodes for line in (ast.get_docstring(n) or "").splitlines() if ">>>" not in line)
        text += " " + " ".join(f"`{quoted}`" for quoted in DOUBLE.findall(text))
    listings = FENCE.findall(text)
    spans = [m[1].strip() for m in SPAN.findall(FENCE.sub("", text))]
    for listing in [*listings, *spans]:
        yield from (one or other for one, other in QUOTED.findall(listing))
        yield from DOUBLE.findall(listing)  # with quotes of the other kind inside
    yield from spans


def terms(text: str) -> list[ast.expr]:
    """The terms of a sum of calls of parts and presets; none, if it is something else, or leaves a place open."""
    try:
        node = ast.parse(text.removeprefix("+").strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return []
    out = list[ast.expr]()
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        out.insert(0, node.right)
        node = node.left
    out.insert(0, node)
    return out if all(_named(term) for term in out) and any(isinstance(t, ast.Call) for t in out) else []


def _named(term: ast.expr) -> bool:
    head = term.func if isinstance(term, ast.Call) else term
    if not isinstance(head, ast.Name) or (head.id not in known_presets() and registry.get(head.id) is None):
        return False
    inner = [n for n in ast.walk(term) if n is not head]
    called = {id(n.func) for n in inner if isinstance(n, ast.Call)}
    known = {*known_presets(), *registry.of(), "inf", "nan"}
    names = [n for n in inner if isinstance(n, ast.Name)]
    open_ends = [n for n in names if n.id.startswith("my_") or (id(n) not in called and n.id not in known)]
    return not open_ends and not any(isinstance(n, ast.Constant) and n.value is ... for n in inner)


def read(text: str) -> None:
    """As a recipe, if it can be one as a whole; else each of its terms. An exchange alone may want a memory that is named apart."""
    values = parse(text.removeprefix("+").strip(), known_presets())
    values = values if isinstance(values, tuple) else (values,)
    exchange = len(values) > 1 and any(isinstance(v, Part) and v.kind == "exchange" for v in values)
    if exchange or any(isinstance(v, Recipe) for v in values):
        Recipe.of(text)


@cache
def texts() -> dict[str, set[str]]:
    """By page, or by source file."""
    found = {str(p.relative_to(ROOT)): {" ".join(t.split()) for t in spelt(p)} for p in (*PAGES, *SOURCES)}
    return {page: {t for t in spelt if terms(t)} for page, spelt in found.items()}


@pytest.mark.parametrize("page", [str(p.relative_to(ROOT)) for p in PAGES])
def test_recipe_texts_of_a_page_are_read(page: str) -> None:
    assert not wrong_on(page)


def test_recipe_texts_of_docstrings_are_read() -> None:
    assert not {page: wrong for page in texts() if page.endswith(".py") and (wrong := wrong_on(page))}


def wrong_on(page: str) -> dict[str, str]:
    wrong = dict[str, str]()
    for text in sorted(texts()[page] - REFUSED):
        try:
            read(text)
        except GossamerError as error:
            wrong[text] = str(error)
    return wrong


@pytest.mark.parametrize("text", sorted(REFUSED))
def test_what_is_shown_as_refused_is_refused(text: str) -> None:
    assert any(text in found for found in texts().values()), "no page shows it any more"
    with pytest.raises(GossamerError):
        read(text)


def test_the_pages_have_recipe_texts() -> None:
    """So that the tests above cannot pass for want of any."""
    found = texts()
    assert sum(map(len, found.values())) > 150
    assert "scatter(qsgd()) + local_sgd(8)" in found["docs/choosing.md"]
    assert not terms("accordion(mild, harsh, epoch)")
    with pytest.raises(GossamerError):
        read("powersgd(ranks=2)")
