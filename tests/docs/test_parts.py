"""Nobody has to remember: what is registered has its page, and the README's numbers are those that are counted."""

import importlib
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gossamer.bench.catalogue import example, refused_with
from gossamer.core.contracts import Codec
from gossamer.core.parts import registry
from gossamer.recipes import presets

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "ext"))

parts: Any = importlib.import_module("parts")
refused_once = cache(refused_with)  # by a page and by its test


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts.catalogue, "refused_with", refused_once)
        return dict(parts.pages())


@pytest.mark.parametrize("name", registry.of())
def test_every_part_has_its_page_and_is_listed(pages: dict[str, str], name: str) -> None:
    part = registry.of()[name]
    where = parts.path_of(part)
    page = pages[where]
    assert page.startswith(f"# {name}\n")
    assert f"]({where})" in pages["index.md"]
    assert re.search(rf"^{re.escape(where.removesuffix('.md'))}$", pages["index.md"], re.M)
    docs = parts.read(part)
    assert docs.summary
    assert docs.example, f"{name} shows no example"
    assert part.kind in parts.KINDS, f"say in gossamer/bench/catalogue/samples.py what a {part.kind} is"


@pytest.mark.parametrize("name", registry.of("codec", "exchange", "schedule", "topology"))
def test_what_travels_is_counted(pages: dict[str, str], name: str) -> None:
    assert "| 4 ranks | 16 ranks |" in pages[parts.path_of(registry.of()[name])]


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_described(pages: dict[str, str], name: str) -> None:
    assert f"\n## {name}\n" in pages["presets.md"]
    docs = parts.read(presets()[name])
    assert docs.paper
    section = pages["presets.md"].split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert f"**Use it** {parts._escape(docs.use)}\n" in section
    assert f"**Not for** {parts._escape(docs.not_for)}\n" in section
    rows = [refusal.text for refusal in refused_once(example(name), name)]
    assert all(f"| `{text}` |" in section for text in rows)
    assert ("Refused:" in section) == bool(rows)


def test_a_contract_s_law_is_quoted(pages: dict[str, str]) -> None:
    assert parts.law(Codec)
    assert "**Codec.**" in pages["codecs/qsgd.md"]
    assert "**LinearCodec.**" in pages["codecs/powersgd.md"]


def test_refusals_are_found_by_trying(pages: dict[str, str]) -> None:
    assert "`allreduce(topk())`" in pages["refusals.md"]
    assert "`gather(topk())` |" in pages["codecs/topk.md"]
    assert "bits must be between 1 and 8" in pages["codecs/qsgd.md"]


def test_formulas_get_a_line_each() -> None:
    text = parts.prose("a = 1;  b_i = 2\nand more;  c = 3. Then words, as *ever*.")
    assert text == "```text\na = 1\nb_i = 2 and more\nc = 3\n```\n\nThen words, as \\*ever\\*."


def test_links_between_pages_lead_somewhere(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        for target in re.findall(r"\]\(([^)#]+\.md)", text):
            assert str((Path("/") / name).parent.joinpath(target).resolve().relative_to("/")) in pages, (name, target)


def test_pages_are_written_once_and_stale_ones_go(
    pages: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "pages", lambda: iter(pages.items()))
    (tmp_path / "codecs").mkdir()
    (tmp_path / "codecs" / "gone.md").write_text("")
    parts.write(tmp_path)
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.md")} == set(pages)
    before = (tmp_path / "index.md").stat().st_mtime_ns
    parts.write(tmp_path)
    assert (tmp_path / "index.md").stat().st_mtime_ns == before


def ratios(text: str) -> dict[str, float]:
    """The table of presets: name, and how many times fewer bytes on 4 ranks."""
    rows = re.findall(r"^\| \[?`?(\w+)`?[^|]*\|.*?\| ([\d.]+) x \|", text, re.M)
    return {name: float(ratio) for name, ratio in rows}


def test_the_readme_lists_every_preset_with_the_bytes_that_are_counted(pages: dict[str, str]) -> None:
    told, counted = ratios((ROOT / "README.md").read_text()), ratios(pages["presets.md"])
    assert counted.keys() == presets().keys()
    for name, ratio in counted.items():
        assert told.get(name) == pytest.approx(ratio, rel=0.03), f"README.md: {name} sends {ratio} times fewer bytes"
