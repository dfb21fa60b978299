"""`gossamer goodput`: text, JSON and a page say the same, and bad input is a sentence and exit code 2."""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.costs.made_runs import MadeProcess, restarted

Say = Callable[..., tuple[int, str, str]]


def test_text_json_and_page_say_the_same(say: Say, tmp_path: Path) -> None:
    restarted(tmp_path / "run")
    code, text, err = say("goodput", "run", "--price", "36 USD/hour", "--page", "g.html")
    assert (code, err) == (0, "")
    assert text.startswith("43.4 % of the paid time became steps that count; the most of the rest, 28.0 %: starting.")
    code, told, _ = say("goodput", "run", "--price", "36 USD/hour", "--json")
    found = json.loads(told)
    assert code == 0
    assert found["goodput"] == pytest.approx(30.4 / 70)
    assert found["money"] == pytest.approx(
        {"currency": "USD", "per_rank_and_hour": 36.0, "total": 0.70, "per_1000_steps": 1000 * 0.70 / 152}
    )
    assert sum(found["seconds"].values()) == pytest.approx(found["paid_seconds"]) == pytest.approx(70)
    assert [len(rank["processes"]) for rank in found["ranks"]] == [2, 2]
    page = (tmp_path / "g.html").read_text()
    for said in ("43.4 %", "0.700 USD", "1,000 steps cost 4.61 USD", "rank1.2.abcd.jsonl"):
        assert said in page, said
        assert said in text or said.startswith(("1,000", "rank1"))
    assert not re.search(r"(src|href)=\"(?!data:)", page), "a page needs nothing else"


class Balance(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = list[str]()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in {"meta", "link", "rect", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "rect":
            assert self.open.pop() == tag


def test_a_page_is_whole_and_whatever_names_contain_is_text(say: Say, tmp_path: Path) -> None:
    process = MadeProcess(0, recipe="<b>&", size=3).works(11)
    process.say("held out", step=11, value=1.25)
    process.write(tmp_path / "<run>")
    assert say("goodput", "<run>", "--page", "g.html")[0] == 0
    page = (tmp_path / "g.html").read_text()
    assert "<b>&" not in page
    assert "&lt;run&gt;" in page
    assert "No events of ranks 1 and 2" in page
    assert "1.250" in page
    reader = Balance()
    reader.feed(page)
    assert reader.open == []


def test_held_out_values_have_their_cost(say: Say, tmp_path: Path) -> None:
    process = MadeProcess(0, size=1).works(101)
    process.say("held out", step=101, value=1.5)
    process.ends().write(tmp_path / "run")
    _, text, _ = say("goodput", "run", "--price", "240/hour")
    assert re.search(r"^101 +1\.5000 +15\.0 s +1\.00$", text, re.M), text


@pytest.mark.parametrize(
    "price", ["cheap", "2.10", "2.10/day", "-1/hour", "nan/hour", "1e999/hour", "/hour", "2.10 dollars/hour", ""]
)
def test_a_price_that_is_none_is_refused(say: Say, tmp_path: Path, price: str) -> None:
    restarted(tmp_path / "run")
    code, out, err = say("goodput", "run", "--price", price)
    assert (code, out) == (2, "")
    assert re.search(r"is not a price: write it as 2\.10/hour or 2\.10 USD/hour|is negative", err), err


def test_an_empty_folder_is_named_and_told_what_to_do(say: Say, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    code, out, err = say("goodput", "run")
    assert (code, out) == (2, "")
    assert err == (
        "gossamer: run holds no events of a run (files such as rank0.1.3f2a.jsonl). Record a run with attach(..., events=FOLDER), and "
        "give that folder\n"
    )


def test_of_a_file_that_ends_early_all_else_is_told(say: Say, tmp_path: Path) -> None:
    path = MadeProcess(0, size=1).works(101).write(tmp_path / "run")
    _, whole, _ = say("goodput", "run")
    path.write_text(path.read_text() + '{"event"')
    code, out, err = say("goodput", "run")
    assert (code, out) == (2, whole)
    assert "rank0.1.abcd.jsonl: the last line is cut off" in err


def test_a_page_is_not_written_over_anothers_file(say: Say, tmp_path: Path) -> None:
    restarted(tmp_path / "run")
    (tmp_path / "mine.html").write_text("mine")
    code, out, err = say("goodput", "run", "--page", "mine.html")
    assert (code, out) == (2, "")
    assert "is no report that gossamer wrote" in err
    assert (tmp_path / "mine.html").read_text() == "mine"
    assert say("goodput", "run", "--page", "nowhere/mine.html")[0] == 1


def test_who_pays_for_processes_only_pays_no_gap(say: Say, tmp_path: Path) -> None:
    restarted(tmp_path / "run")
    _, told, _ = say("goodput", "run", "--json", "--pays", "processes")
    found = json.loads(told)
    assert found["seconds"]["standing"] == pytest.approx(0)
    assert found["notes"] == ["Not paid for, between processes: 10.0 s."]
    assert say("goodput", "run", "--pays", "nobody")[0] == 2


def test_a_terminal_of_80_columns_shows_every_number_of_a_rank(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarted(tmp_path / "run")
    rows = [re.findall(r"\S+", line) for line in say("goodput", "run")[1].splitlines() if re.match(r"[01] +2 ", line)]
    assert len(rows) == 2
    for name, value in {"COLUMNS": "80", "TERM": "xterm", "FORCE_COLOR": "1", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    code, out, _ = say("goodput", "run")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()
    assert code == 0
    assert [line.split() for line in lines if re.match(r"[01] +2 ", line)] == rows
