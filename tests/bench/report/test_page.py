"""The page as a file: complete, well formed, small, safe."""

import json
import os
import struct
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.bench.report.made import made

from gossamer.bench.record import Record
from gossamer.bench.report import figures, render, write_figures, write_html
from gossamer.core.errors import GossamerError

VOID = {"meta", "link", "br", "wbr"}


class Reader(HTMLParser):
    """Checks that elements close in order; keeps texts, ids and addresses."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.tables = 0
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tables += tag == "table"
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href"):
                self.addresses.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def embedded(page: str) -> dict[str, list[dict[str, object]]]:
    return json.loads(page.split('id="data">')[1].split("</script>", maxsplit=1)[0])


def test_a_whole_page_in_one_small_file() -> None:
    page = render(made())
    read = Reader(page)
    assert len(page.encode()) < 300_000
    assert len(read.ids) == len(set(read.ids))
    assert all(a.startswith("#") or a == "data:," for a in read.addresses)  # nothing from elsewhere
    assert "http://www.w3.org/2000/svg" in page
    assert page.count("http") == page.count("http://www.w3.org/2000/svg")
    for section in ("time-to-quality", "bytes", "layers", "decisions", "failures", "reproduce"):
        assert section in read.ids
    assert read.tables == 5
    for said in (
        "not reached",
        "⚑ 1.083",
        "rank 2 did not answer",
        "torch 2.13.0+cpu",
        "<span>--rate</span> <span>200mbit</span>",
        "rank 4 again",
    ):
        assert said in page


def test_large_records_stay_small() -> None:
    record = made(steps=5000)
    record.runs = record.runs * 3
    record.runs[0].layer_errors = {f"layer.{i}.weight": i / 2000 for i in range(2000)}
    record.runs[1].decisions = [(i, "gather(qsgd(bits=4, bucket=512)) + error_feedback()") for i in range(5000)]
    page = render(record)
    assert len(page.encode()) < 1_500_000
    assert "of its steps" in page
    assert "The 60 of 2025 parameters with the largest errors" in page


def test_nothing_in_a_record_can_become_markup() -> None:
    evil = '</script><script>alert("x")</script><!-- & \u2028'
    record = made(["ddp", "topk"])
    record.command = record.note = record.summary = record.machine = record.metric = evil
    record.versions = {evil: evil}
    run = record.runs[1]
    run.name = run.recipe = run.error = evil
    run.status = "failed"
    run.layer_errors = {evil: 0.5}
    run.decisions = [(1, evil)]
    page = render(record)
    Reader(page)
    assert "<script>alert" not in page
    assert page.count("</script>") == 2
    assert embedded(page)["runs"][1]["name"] == evil


@pytest.mark.parametrize("case", ["nothing", "one run", "no evaluations", "interrupted", "not finite", "no baseline"])
def test_partial_records(case: str) -> None:
    record = made(["ddp", "topk"], steps=12, dead="")
    if case == "nothing":
        record.runs = []
    elif case == "one run":
        record = made(["terngrad"])
    elif case == "no evaluations":
        record = made(evaluate=False)
    elif case == "interrupted":
        record.runs[1] = type(record.runs[1])("topk", "topk", "interrupted", "interrupted by SIGINT")
        record.runs[0].status = "interrupted"
    elif case == "not finite":
        for step in record.runs[1].steps[5:]:
            step.loss = float("nan")
        record.runs[1].evaluations[-1].quality = float("inf")
        record.runs[1].layer_errors["embed.weight"] = float("nan")
        record.runs[1].residuals.append((99, float("inf")))
    else:
        record.baseline = "who"
    page = render(record)
    Reader(page)
    embedded(page)
    assert "<h1>" in page


def test_an_interrupted_comparison_is_no_failure() -> None:
    record = made(["ddp", "topk", "qsgd"], steps=12, dead="")
    for run in record.runs[1:]:
        run.status, run.error = "interrupted", "interrupted by SIGINT"
    record.runs[2].steps = []
    page = render(record)
    assert "This is what was seen until then: topk came to step 19, qsgd came to step 0." in page
    assert "failures" not in Reader(page).ids


def test_writing_leaves_the_old_page_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text(old := '<meta name="generator" content="gossamer">')

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space"):
            write_html(made(["ddp"]), path)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text() == old
    write_html(made(["ddp"]), path)
    assert path.read_text().startswith("<!doctype html>")


def test_a_record_read_back_makes_the_same_page(tmp_path: Path) -> None:
    made().write(tmp_path / "record.json")
    assert render(Record.read(tmp_path / "record.json")) == render(made())


def test_svg_figures(tmp_path: Path) -> None:
    paths = write_figures(made(), tmp_path, ["svg"])
    assert [p.name for p in paths] == [
        f"{name}.svg" for name in ("quality-time", "quality-bytes", "loss-time", "step-time", "residuals")
    ]
    for path in paths:
        texts = {e.text for e in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")}
        assert "terngrad" in texts
        assert "nan" not in path.read_text()


def test_png_figures(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py", reason="PNG figures need resvg-py")
    paths = write_figures(made(), tmp_path)
    assert len(paths) == 10
    for path in paths[5:]:
        assert path.read_bytes().startswith(b"\x89PNG")
        chunks = dict(_chunks(path.read_bytes()))
        assert chunks[b"tEXt"] == b"Software\0gossamer"
        assert next(iter(chunks)) == b"IHDR"


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Every chunk of a PNG, whose check sum must be right."""
    at = 8
    while at < len(png):
        (length,) = struct.unpack_from(">I", png, at)
        body = png[at + 4 : at + 8 + length]
        assert struct.unpack_from(">I", png, at + 8 + length) == (zlib.crc32(body),)
        yield body[:4], body[4:]
        at += length + 12


def test_png_without_its_package_says_so_and_leaves_the_svg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(figures, "import_module", absent)
    with pytest.raises(GossamerError, match="pip install resvg-py"):
        write_figures(made(), tmp_path)
    assert len(list(tmp_path.glob("*.svg"))) == 5


def test_a_folder_whose_name_is_no_text_does_not_take_the_page_along(tmp_path: Path) -> None:
    record = made(["ddp"])
    record.command = f"gossamer compare ddp --out {os.fsdecode(bytes([0xE9, 0x74, 0xE9]))}"
    record.write(tmp_path / "record.json")
    again = Record.read(tmp_path / "record.json")
    assert again.command == record.command
    write_html(again, tmp_path / "x.html")
    assert "<span>\\udce9t\\udce9</span>" in (tmp_path / "x.html").read_text(encoding="utf-8")
