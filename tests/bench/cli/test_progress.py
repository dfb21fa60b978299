"""What a person sees while a trial runs and when it has ended, without running one."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.bench.report.made import made

from gossamer.bench.cli import progress, summary
from gossamer.bench.compare import ComparePlan
from gossamer.bench.compare.events import (
    Ended,
    Entered,
    Failed,
    RankEvent,
    SpoiltCounts,
    Started,
)
from gossamer.bench.record import Evaluation, Step
from gossamer.bench.report import render, write_markdown

LONG = "scatter(ternary()) + error_feedback() + slowmo(12)"


def step(run: str, number: int, wait: float | None = 0.25, sent: int | None = 1_500_000, at: float = 0.0) -> RankEvent:
    return RankEvent(Step(number, at or 0.5 * number, 7.25, sent, wait=wait), run)


def judged(run: str, number: int, sent: int | None = 1_500_000, at: float = 0.0) -> RankEvent:
    return RankEvent(Evaluation(number, at or 0.5 * number, sent, 6.5), run)


def shown(table: progress.LiveTable, width: int) -> list[str]:
    paper = Console(width=width, file=io.StringIO())
    paper.print(table.table())
    text = paper.file
    assert isinstance(text, io.StringIO)
    return text.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 140])
def test_a_live_table_folds_names_but_never_numbers(width: int) -> None:
    table = progress.LiveTable(ComparePlan({"ddp": "ddp", LONG: LONG}, steps=1000))
    for k in range(1, 101):
        table.show(step("ddp", k, wait=None))
        table.show(step(LONG, k))
    table.show(judged("ddp", 100))
    lines = shown(table, width)
    assert max(map(len, lines)) <= width
    assert lines[1].split() == ["ddp", "100/1000", "7.250", "6.5000", "1.50", "MB", "500", "ms", "450", "s", "trains"]
    assert "100/1000  7.250" in lines[2]
    assert "250 ms" in lines[2]  # what DDP does not say


def test_what_is_left_counts_those_who_have_not_begun() -> None:
    table = progress.LiveTable(ComparePlan({"a": "bf16", "b": "fp16"}, steps=20))
    table.show(step("a", 10))
    assert table.rows["a"].left == 5.0
    assert sum(progress._expected(row, table.rows) for row in table.rows.values()) == 15.0
    table.show(judged("a", 10))
    assert shown(table, 80)[-1].strip() == "0:00 past, about 0:15 left"


def test_the_live_table_says_what_it_waits_for_before_the_first_step() -> None:
    table = progress.LiveTable(ComparePlan({"a": "bf16", "b": "fp16"}, steps=20))
    assert shown(table, 80)[-1].strip() == "0:00 past, ranks are starting"
    table.show(RankEvent(Started(4, True)))
    table.show(RankEvent(Entered("allreduce(bf16())", 0), "a"))
    lines = shown(table, 80)
    assert lines[-1].strip() == "0:00 past, 4 ranks are there, 1 of 2 recipes are ready"
    assert lines[1].split()[-1] == "ready"
    assert lines[2].rstrip().endswith("to come")
    assert all("waits" not in line for line in lines[1:])  # it is what a step waits for the network


def test_the_first_estimate_knows_neither_of_the_start_nor_of_a_slow_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eleven seconds of start-up, a first step of three seconds, then steps of .1 s, and .5 s for an evaluation of each turn."""
    now = 0.0
    monkeypatch.setattr(progress, "monotonic", lambda: now)
    table = progress.LiveTable(ComparePlan({"a": "bf16", "b": "fp16"}, steps=50))
    now, trained = 11.0, 0.0
    for number in range(1, 6):
        took = 3.0 if number == 1 else 0.1
        now, trained = now + took, trained + took
        table.show(step("a", number, at=trained))
        assert "left" not in shown(table, 80)[-1]  # too early to tell
    now += 0.5
    table.show(judged("a", 5, at=trained))
    told = shown(table, 80)[-1].strip()
    left = int(told.partition("about 0:")[2].partition(" ")[0])
    true = 95 * 0.1 + 19 * 0.5
    assert true / 2 <= left <= true * 1.5, told


def test_whoever_had_its_steps_chases_the_baseline_and_whoever_did_not_end_was_cut_off() -> None:
    with progress.LiveTable(ComparePlan({"a": "bf16", "b": "fp16"}, steps=2), Console(file=io.StringIO())) as table:
        for k in (1, 2, 3):
            table.show(step("b", k))
        assert (table.rows["b"].state, table.rows["b"].left) == ("chases", 0.0)
        table.show(RankEvent(Ended(1, 0, 1, None), "b"))
    assert [row.state for row in table.rows.values()] == ["cut off", "done"]


def test_plain_lines_leave_out_what_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    lines = progress.PlainLines(ComparePlan({"ddp-powersgd": "ddp-powersgd", "qsgd": "qsgd"}, steps=20))
    for event in (
        step("ddp-powersgd", 5, None, None),
        judged("ddp-powersgd", 5, None),
        step("qsgd", 5),
        judged("qsgd", 5),
    ):
        lines.show(event)
    lines.show(RankEvent(Failed("no room"), "qsgd"))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "ddp-powersgd  step   5/20   2.50 s  held out 6.5000  loss 7.250  a step 500 ms  left 7.50 s",
        "        qsgd  step   5/20   2.50 s  held out 6.5000  loss 7.250  sent 1.50 MB  a step 500 ms  waits 250 ms  left 7.50 s",
        "qsgd: no room",
    ]


def test_where_nothing_is_judged_a_plain_line_has_no_quality(capsys: pytest.CaptureFixture[str]) -> None:
    lines = progress.PlainLines(ComparePlan({"qsgd": "qsgd"}, steps=20))
    lines.show(RankEvent(Step(5, 2.5, 7.25, 10), "qsgd"))
    lines.show(RankEvent(Evaluation(5, 2.5, 10, float("nan")), "qsgd"))
    assert capsys.readouterr().err == "qsgd  step   5/20   2.50 s  loss 7.250  sent 10 B  a step 500 ms  left 7.50 s\n"


def test_a_step_beyond_those_that_were_asked_for_is_not_counted_among_them(capsys: pytest.CaptureFixture[str]) -> None:
    lines = progress.PlainLines(ComparePlan({"qsgd": "qsgd"}, steps=10))
    for done in (10, 15):
        lines.show(step("qsgd", done))
        lines.show(judged("qsgd", done))
    first, second = capsys.readouterr().err.splitlines()
    assert "step  10/10 " in first
    assert "step     15 " in second


def test_lines_of_json_say_null_for_what_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    progress.json_line({"event": "step", "loss": float("nan"), "wait": None})
    assert json.loads(capsys.readouterr().out) == {"event": "step", "loss": None, "wait": None}


def test_the_page_to_start_with_shows_the_table_as_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    summary.summary(made())
    heads = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("recipe")).split()
    page = (Path(__file__).parents[3] / "docs" / "start.md").read_text()
    shown = next(line for line in page.splitlines() if line.startswith("recipe "))
    assert shown.split() == heads
    for head in ("`time`", "`vs ddp`", "`steps`", "`mean step`", "`sent/step`", "`NIC/wire`", "`last`"):
        assert head in page


@pytest.mark.parametrize("width", [80, 140])
def test_the_outcome_fits_a_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    paper = Console(width=width, file=io.StringIO(), highlight=False)
    monkeypatch.setattr(summary, "console", lambda: paper)
    record = made()
    record.runs[3].name = LONG
    summary.summary(record)
    text = paper.file
    assert isinstance(text, io.StringIO)
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    heads = next(line for line in lines if line.startswith("recipe")).split()
    assert heads == ["recipe", "time", "vs", "ddp", "steps", "mean", "step", "sent/step", "NIC/wire", "last"]
    rows = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert rows["ddp"][:4] == ["242", "s", "1.00", "150"]
    assert rows["topk"][-2:] == ["1.083!", f"{record.runs[4].evaluations[-1].quality:.4f}"]
    assert rows["sgp"][:2] == ["failed", "57"]  # cut off: no ratio, and the steps that it did
    assert "! the interface counted 5% more or less than we did" in lines
    assert "  step 57, bucket 3, verb AllToAll" in lines


def test_a_run_that_goes_on_begins_where_it_was_and_says_what_was_spoilt(capsys: pytest.CaptureFixture[str]) -> None:
    lines = progress.PlainLines(ComparePlan({"a": "bf16"}, steps=30))
    lines.show(RankEvent(Entered("allreduce(bf16())", 20), "a"))
    lines.show(judged("a", 20))
    lines.show(step("a", 21, sent=0))  # what it launched is on its way
    lines.show(RankEvent(SpoiltCounts(2, 1, {"1": 3}), "a"))
    lines.show(judged("a", 25, sent=2_000_000))
    first, second = capsys.readouterr().err.splitlines()
    assert " 20/30 " in first
    assert "sent 2.00 MB" in second
    assert second.endswith(", 3 spoilt")


def test_the_closing_table_says_which_rank_spoilt_what(capsys: pytest.CaptureFixture[str]) -> None:
    record = made(["ddp", "qsgd"], steps=20)
    record.runs[1].skipped_steps, record.runs[1].spoilt = 3, {"1": 2}
    summary.summary(record)
    assert "\nqsgd: 3 steps skipped, 2 of them spoilt by rank 1\n" in capsys.readouterr().out


def test_a_loss_that_has_diverged_is_short_wherever_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    plan, high = ComparePlan({"a": "bf16"}, steps=20), 1.234e34
    trained, seen = RankEvent(Step(10, 5.0, high, 10), "a"), RankEvent(Evaluation(10, 5.0, 10, high), "a")
    table, lines, record = progress.LiveTable(plan), progress.PlainLines(plan), made(["ddp", "qsgd"], steps=20)
    for event in (trained, seen):
        table.show(event)
        lines.show(event)
    for run in record.runs:
        run.evaluations[-1] = replace(run.evaluations[-1], quality=high)
    summary.summary(record)
    said = capsys.readouterr()
    for text in ("\n".join(shown(table, 120)), said.err, said.out, write_markdown(record), render(record)):
        assert "1.2" in text
        assert "e+34" in text
        assert not re.search(r"\d{20}|(\d{3}\xa0){5}", text)
