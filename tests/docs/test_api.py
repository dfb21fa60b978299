"""The API reference: what is public stands on it, with words."""

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

import gossamer

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "ext"))
api: Any = importlib.import_module("api")
KINDS = [gossamer.Communicator, gossamer.Recipe, gossamer.ddp.Hook]


@pytest.fixture(scope="module")
def page() -> str:
    return api.page()


@pytest.mark.parametrize("name", gossamer.__all__)
def test_every_public_name_stands_in_the_reference(page: str, name: str) -> None:
    section = page.partition(f"\n### gossamer.{name}\n")[2].partition("\n### ")[0]
    assert section, name
    value = getattr(gossamer, name)
    assert isinstance(value, str) or inspect.getdoc(value), f"gossamer.{name} has no docstring"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_method_has_its_words(page: str, kind: type) -> None:
    there = dict(api.members(kind))
    assert len(there) > 5
    for name, member in there.items():
        assert inspect.getdoc(member), f"{kind.__name__}.{name}: say in its docstring what it does"
        assert api._prose(inspect.getdoc(member))[0] in page


@pytest.mark.parametrize("module", api.MODULES)
def test_every_function_of_the_other_modules_is_there(page: str, module: str) -> None:
    there = dict(api.public(importlib.import_module(module)))
    assert there
    for name, value in there.items():
        assert f"\n### {module}.{name}\n" in page
        assert inspect.getdoc(value), f"{module}.{name} has no docstring"


def test_signatures_are_as_one_writes_them(page: str) -> None:
    assert "    recipe: str | Recipe,\n" in page
    assert "    *,\n    nodes: int | Literal['hosts', 'members'] | DeviceMesh | None = None,\n" in page
    for argument in inspect.signature(gossamer.attach).parameters:
        assert f"\n    {argument}: " in page
