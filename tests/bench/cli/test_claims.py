"""`gossamer claims`, as a user types it: the list, a quick look, and what is refused."""

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.bench.claims import toy

from gossamer.bench.claims import DEAR, ClaimRecord, begun, find, names, running
from gossamer.bench.claims.record import JudgedStatement
from gossamer.bench.cli import claims
from gossamer.bench.workloads import DataError, Ridge

Say = Callable[..., tuple[int, str, str]]


def test_all_claims_are_listed_and_wait_where_there_is_no_record(say: Say) -> None:
    code, out, _ = say("claims")
    assert code == 0
    assert all(name in out for name in names())
    assert "0 statements judged" in out
    assert "No verdicts in runs/claims: those that were found are in docs/claims/records" in out
    listed = json.loads(say("claims", "--json")[1])
    assert {s["verdict"] for claim in listed for s in claim["statements"]} == {"waiting"}


def test_a_claim_that_does_not_exist_is_one_line(say: Say) -> None:
    code, out, err = say("claims", "ef2l")
    assert (code, out) == (2, "")
    assert "there is no claim called 'ef2l'. Did you mean 'ef21'?" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("option", ["--quick", "--anew", "--confirm"])
def test_what_is_asked_of_one_claim_needs_its_name(say: Say, option: str) -> None:
    code, out, err = say("claims", option)
    assert (code, out) == (2, "")
    assert "name it" in err


def test_a_place_that_cannot_be_written_is_one_line(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    Path("file").touch()
    code, _, err = say("claims", "--pages", "file")
    assert (code, err) == (1, "gossamer: the folder file cannot be made: File exists; give another one with --pages\n")
    Path("pages").mkdir()
    Path("pages/index.md").write_text("mine")
    code, _, err = say("claims", "--pages", "pages")
    assert (code, "index.md is there already" in err, "with --pages" in err) == (2, True, True)
    monkeypatch.setattr(claims, "run_claim", lambda claim, known, keep, tell: keep(known))
    monkeypatch.setattr("os.replace", denied)
    code, _, err = say("claims", "ef21")
    assert (code, err) == (1, "gossamer: runs/claims/ef21.json could not be written: Permission denied\n")


def judged(path: Path, plan: str = "") -> ClaimRecord:
    """A record that is done, as if it had been run."""
    known = begun(find("ef21"), path)
    known.done, known.plan = True, plan or known.plan
    only = known.statements[0]
    known.statements = [JudgedStatement(only.key, only.says, only.rule, only.expected, "not", "found so")]
    known.write(path)
    return known


@pytest.mark.parametrize("more", [(), ("--confirm",)])
def test_two_commands_do_not_write_one_record_at_once(
    say: Say, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    folder = Path("runs/claims")
    folder.mkdir(parents=True)
    before = judged(folder / "ef21.json")
    other = os.open(folder / ".ef21.json.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_EX)
    monkeypatch.setattr(claims, "confirm", lambda claim, known, tell: [])
    monkeypatch.setattr(claims, "run_claim", lambda claim, known, keep, tell: None)
    try:
        code, out, err = say("claims", "ef21", *more)
        assert say("claims", "choco")[0] == 0  # another claim has a record of its own
    finally:
        os.close(other)
    assert (code, out) == (2, "")
    assert "another command writes to runs/claims/ef21.json: wait until it has ended, or give another" in err
    assert ClaimRecord.read(folder / "ef21.json") == before
    assert say("claims", "ef21", *more)[0] == 0
    assert [path.name for path in folder.iterdir()] == ["ef21.json"]


def test_what_has_its_verdict_is_shown_and_not_run_again(say: Say) -> None:
    folder = Path("runs/claims")
    folder.mkdir(parents=True)
    before = judged(folder / "ef21.json")
    code, out, _ = say("claims", "ef21")
    assert code == 0
    assert "not (expected: holds)  found so" in out
    assert ClaimRecord.read(folder / "ef21.json") == before
    out = say("claims")[1]
    assert "1 statements judged: 0 holds, 0 partly, 1 not" in out
    assert "No verdicts" not in out
    assert say("claims", "--pages", "pages")[0] == 0
    assert "Verdict: **not**" in Path("pages/ef21.md").read_text()


def test_verdicts_that_are_confirmed_are_told_as_json_too(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path("runs/claims")
    folder.mkdir(parents=True)
    judged(folder / "ef21.json")
    monkeypatch.setattr(claims, "confirm", lambda claim, known, tell: [])
    code, out, _ = say("claims", "ef21", "--confirm", "--json")
    assert (code, json.loads(out)["statements"][0]["verdict"]) == (0, "not")


@pytest.mark.parametrize("more", [("ef21",), ("--json",), ("ef21", "--confirm")])
def test_pages_run_no_claim(say: Say, more: tuple[str, ...]) -> None:
    code, out, err = say("claims", *more, "--pages", "pages")
    assert (code, out, "runs no claim" in err, Path("pages").exists()) == (2, "", True, False)


def test_the_record_of_another_plan_is_refused_and_its_verdicts_are_stale(say: Say) -> None:
    folder = Path("runs/claims")
    folder.mkdir(parents=True)
    judged(folder / "ef21.json", plan="an earlier one")
    code, _, err = say("claims", "ef21")
    assert code == 2
    assert "is of another plan (an earlier one;" in err
    assert "--anew" in err
    (row,) = (c for c in json.loads(say("claims", "--json")[1]) if c["claim"] == "ef21")
    assert row["statements"][0]["verdict"] == "stale"
    (folder / "ef21.json").write_text("{}")
    assert say("claims")[0] == 2


def test_data_that_cannot_be_had_is_one_line_and_nothing_is_lost(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: Ridge) -> None:
        raise DataError("the data cannot be fetched: no network; see docs/workloads.md")

    monkeypatch.setattr(Ridge, "load", gone)
    code, out, err = say("claims", "ef21", "--quick")
    assert (code, out) == (1, "")
    assert err == "gossamer: the data cannot be fetched: no network; see docs/workloads.md\n"


def test_a_quick_look_says_what_it_ran_and_leaves_no_record(say: Say) -> None:
    code, out, _ = say("claims", "ef21", "--quick", "--json")
    assert code == 0
    assert json.loads(out)["runs"] == 3
    assert not Path("runs/claims").exists()
    assert len(DEAR) == 3
    assert Path("runs/claims") == claims.ELSEWHERE


@pytest.mark.parametrize("two", [("--quick", "--confirm"), ("--quick", "--anew"), ("--anew", "--confirm")])
def test_a_claim_is_run_in_one_way_at_a_time(say: Say, two: tuple[str, str]) -> None:
    code, out, err = say("claims", "ef21", *two)
    assert (code, out) == (2, "")
    assert err == "gossamer: --quick, --anew and --confirm run other things: give one of them\n"


def test_who_looks_at_a_stale_verdict_is_told_what_confirms_it(say: Say) -> None:
    folder = Path("runs/claims")
    folder.mkdir(parents=True)
    known = judged(folder / "ef21.json")
    assert "stale" not in say("claims", "ef21")[1]
    known.sources = dict.fromkeys(known.sources, "other")
    known.write(folder / "ef21.json")
    code, out, _ = say("claims", "ef21")
    assert code == 0
    assert "stale (expected: holds)" in out
    assert "--confirm makes the first seed's runs again" in out


def test_data_that_is_lost_in_the_midst_of_a_claim_costs_no_run_that_was_finished(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, left = Ridge.load, 8

    def lost(self: Ridge) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise DataError("the data cannot be fetched: no network; see docs/workloads.md")
        return whole(self)

    monkeypatch.setattr(running, "_pool", toy.in_this_process)
    monkeypatch.setattr(claims, "find", lambda name: toy.CLAIM)
    with monkeypatch.context() as patch:
        patch.setattr(Ridge, "load", lost)
        code, out, err = say("claims", "toy", "--json")
    assert (code, out, err) == (1, "", "gossamer: the data cannot be fetched: no network; see docs/workloads.md\n")
    known = ClaimRecord.read(Path("runs/claims/toy.json"))
    assert not known.done
    assert known.runs
    code, out, _ = say("claims", "toy", "--json")
    assert code == 0
    assert [s["verdict"] for s in json.loads(out)["statements"]] == ["holds", "not", "holds", "not", "waiting"]
    after = {run.key: run for run in ClaimRecord.read(Path("runs/claims/toy.json")).runs}
    assert all(after[run.key] == run for run in known.runs)
