"""The notebook runs from its first cell to its last, and shows what it showed when it was committed."""

import re
from pathlib import Path
from typing import Any

import pytest

nbformat: Any = pytest.importorskip("nbformat")
nbclient: Any = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebooks" / "first_steps.ipynb"
pytestmark = pytest.mark.gang


def shown(notebook: Any) -> str:
    return "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", ()))


def rows(text: str) -> dict[str, list[str]]:
    """Of each recipe: bytes, factor, and held-out accuracy after every 20 steps."""
    found = re.findall(r"^(\w+) +(\d+) +([\d.]+) x +(.*)$", text, re.M)
    return {recipe: [sent, factor, *accuracy.split()] for recipe, sent, factor, accuracy in found}


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All cells, run by a kernel of this interpreter in a directory of its own."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    home = tmp_path_factory.mktemp("notebook")
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(home)}})
    client.execute()
    assert (home / "results.json").is_file()
    return notebook


def test_two_recipes_send_the_bytes_that_the_page_shows(executed: Any) -> None:
    now, then = rows(shown(executed)), rows(shown(nbformat.read(NOTEBOOK, as_version=4)))
    assert list(now) == list(then) == ["allreduce", "qsgd"]
    for recipe, (sent, factor, *_) in now.items():  # what ranks agree on at first may grow by some bytes
        assert [float(sent), float(factor)] == pytest.approx([float(n) for n in then[recipe][:2]], rel=0.01), recipe


def test_both_models_become_good(executed: Any) -> None:
    for recipe, (_, _, first, *_, last) in rows(shown(executed)).items():
        assert float(last) > max(float(first), 0.9), recipe


def test_links_of_the_notebook_lead_somewhere() -> None:
    text = NOTEBOOK.read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) >= 3
    assert [link for link in links if not (NOTEBOOK.parent / link).is_file()] == []
