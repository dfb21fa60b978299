"""Errors: whatever docs call by name, a user can catch by that name."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gossamer
from gossamer.core import errors

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("*.md")])
PYTHONS_OWN = {"RuntimeError", "ValueError", "TypeError", "KeyError", "ImportError", "LinAlgError", "FileExistsError"}
OURS = sorted(name for name, value in vars(errors).items() if inspect.isclass(value))


def named() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for name in sorted({*re.findall(r"\b[A-Z]\w*Error\b", page.read_text())} - PYTHONS_OWN):
            yield page.name, name


def test_docs_name_some() -> None:
    assert {"PeerError", "CheckpointError", "AttachError", "RecipeError", "WireError"} <= {name for _, name in named()}


@pytest.mark.parametrize(("page", "name"), [*named(), *(("core/errors.py", name) for name in OURS)])
def test_an_error_is_gossamers_own_by_the_name_that_docs_print(page: str, name: str) -> None:
    assert name in gossamer.__all__, f"{page} speaks of {name}"
    assert issubclass(getattr(gossamer, name), gossamer.GossamerError)


def test_what_a_checkpoint_is_refused_with_can_be_caught(tmp_path: Path) -> None:
    with pytest.raises(gossamer.CheckpointError, match="no such file"):
        gossamer.checkpoint.read(tmp_path / "rank0.pt")
