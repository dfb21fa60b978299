"""A claim is run, killed, gone on with and judged."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from tests.bench.claims import toy

from gossamer.bench.claims import (
    ClaimError,
    ClaimRecord,
    ClaimRun,
    Study,
    begun,
    confirm,
    empty,
    find,
    hash_of,
    names,
    quick,
    run_claim,
    running,
)
from gossamer.bench.claims.claim import ClaimInterrupted
from gossamer.bench.claims.pages import index, page, write_pages
from gossamer.bench.claims.sources import _named, is_judged_code, of_text, sources

COMMAND = """
import sys
from pathlib import Path
from gossamer.bench.claims import begun, run_claim
from tests.bench.claims.toy import CLAIM
if __name__ == "__main__":
    path = Path(sys.argv[1])
    known = begun(CLAIM, path)
    print("begun", flush=True)
    run_claim(CLAIM, known, lambda record: record.write(path), lambda run, left: None)
"""


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> ClaimRecord:
    """The toy's record, of a run that nobody disturbed, as it is read again."""
    path = tmp_path_factory.mktemp("claims") / "toy.json"
    run_claim(toy.CLAIM, begun(toy.CLAIM, path), lambda record: record.write(path), lambda run, left: None)
    return ClaimRecord.read(path)


def test_each_statement_has_its_verdict(known: ClaimRecord) -> None:
    """Gradients halved on purpose lose a good part of the progress; dense against dense is no worse, and not better."""
    assert known.done
    assert known.verdicts() == ["holds", "not", "holds", "not", "waiting"]
    assert known.statements[1].effect[1] > 0.02, "shown to be worse than the margin"
    assert known.verdicts(changed=True) == ["stale"] * 4 + ["waiting"]
    assert known.wall > 0
    assert known.processor > 0


def test_verdicts_stand_again_where_the_first_seeds_runs_are_the_same(known: ClaimRecord) -> None:
    stale = deepcopy(known)
    stale.sources = dict.fromkeys(known.sources, "other")
    made = list[str]()
    assert confirm(toy.CLAIM, stale, lambda run, left: made.append(f"{run.study} {run.case} {run.seed}")) == []
    assert (stale.sources, stale.runs) == (known.sources, known.runs)
    assert sorted(made) == sorted(f"{r.study} {r.case} 30" for r in known.runs if (r.stage, r.seed) == ("judged", 30))


def test_a_method_that_has_changed_stays_stale(known: ClaimRecord) -> None:
    stale = deepcopy(known)
    stale.sources = dict.fromkeys(known.sources, "other")
    changed = next(r for r in stale.runs if (r.study, r.case, r.seed) == ("training", "halved", 30))
    changed.rows["quality"][-1] *= 1.001
    assert confirm(toy.CLAIM, stale, lambda run, left: None) == ["training halved"]
    assert stale.sources != known.sources


def test_a_search_comes_before_the_seeds_that_judge(known: ClaimRecord) -> None:
    tuned = [(r.stage, r.seed) for r in known.runs if r.study == "tuned"]
    assert sorted(tuned) == [("final", 1)] * 2 + [("judged", 30), ("judged", 31)] + [("tuning", 0)] * 3
    ends = {r.number: r.rows["quality"][-1] for r in known.runs if r.stage == "tuning"}
    again = {r.number: r.rows["quality"][-1] for r in known.runs if r.stage == "final"}
    assert sorted(again) == sorted(sorted(ends, key=lambda n: ends[n])[:2])
    best = min(again, key=lambda n: max(ends[n], again[n]))
    assert {r.number for r in known.runs if r.study == "tuned" and r.stage == "judged"} == {best}


def test_what_is_done_is_not_run_again(known: ClaimRecord) -> None:
    def never(*told: object) -> None:
        raise AssertionError("it was run again")

    run_claim(toy.CLAIM, known, never, never)


JUDGED = {  # by claim: a study, a statement on it, and ends of its contenders by which that holds
    "slowmo": ("iid", "d", {"dense": 0.9, "slow dense": 0.8}),
    "sketched_sgd": ("fashion", "d", {"dense": 0.9, "two rounds": 0.89, "one round": 0.1}),
}


@pytest.mark.parametrize("name", JUDGED)
@pytest.mark.parametrize(("who", "verdict"), [("", "holds"), ("the last", "holds"), ("dense", "not")])
def test_a_seed_on_which_the_reference_diverged_shows_nothing(name: str, who: str, verdict: str) -> None:
    """Nothing is gained on dense, and one round loses more than two: both need an end of dense."""
    study, key, ends = JUDGED[name]
    claim = replace(find(name), statements=tuple(s for s in find(name).statements if s.key == key))
    who = list(ends)[-1] if who == "the last" else who
    rows = {case: {"steps": [0.0], "quality": [end]} for case, end in ends.items()}
    runs = [
        ClaimRun(study, case, "judged", 0, seed, {}, rows[case], 0.0, 0.0, "at step 7" * (case == who and seed == 31))
        for case in ends
        for seed in (30, 31, 32)
    ]
    known = replace(empty(claim), runs=runs)
    running.judge(claim, known)
    assert known.verdicts() == [verdict], known.statements[0].found
    assert (known.statements[0].found == "the reference diverged with seed 31") == (who == "dense")


def lasting(path: Path) -> dict:
    """A record without what depends on the clock."""
    table = json.loads(path.read_text())
    for key in ("created", "wall", "commit"):
        del table[key]
    for run in table["runs"]:
        del run["seconds"], run["processor"]
    return table


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def test_interrupted_at_five_random_moments_it_ends_with_the_same_record(
    known: ClaimRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process is killed here; a test that is marked slow does that."""
    monkeypatch.setattr(running, "_pool", toy.in_this_process)
    undisturbed, path, rng = tmp_path / "undisturbed.json", tmp_path / "toy.json", random.Random(1)
    known.write(undisturbed)
    for _ in range(5):
        left = rng.randint(1, 3)

        def interrupt(run: object, waiting: int) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_claim(toy.CLAIM, begun(toy.CLAIM, path), lambda record: record.write(path), interrupt)
        assert not ClaimRecord.read(path).done
    run_claim(toy.CLAIM, begun(toy.CLAIM, path), lambda record: record.write(path), lambda run, left: None)
    assert lasting(path) == lasting(undisturbed)


@pytest.mark.parametrize(
    ("name", "reached"),
    [
        ("woodworth", {"schedules.rounds", "bench.claims.quadratics"}),
        ("sgp", {"topologies.exponential", "mixers.push_sum", "schedules.mixing"}),
        ("terngrad", {"codecs.base", "bench.workloads.images", "bench.workloads.vision", "bench.workloads.shards"}),
        ("atomo", {"bench.workloads.python_source", "bench.workloads.images"}),  # by their names
    ],
)
def test_a_verdict_stands_on_what_its_methods_and_workloads_import(name: str, reached: set[str]) -> None:
    found = sources(find(name))
    assert {f"gossamer.{module}" for module in reached} <= found.keys()
    assert "" not in found.values()
    assert not [module for module in found if module.endswith((".cache", ".kernels", ".core"))]


def test_a_record_from_before_imports_were_followed_stands_until_what_it_knows_has_changed() -> None:
    claim = find("woodworth")
    now = sources(claim)
    named = {name: print for name, print in now.items() if name in _named(claim)}
    assert "gossamer.schedules.rounds" not in named
    assert is_judged_code(claim, now)
    assert is_judged_code(claim, named)
    assert not is_judged_code(claim, {**named, claim.module: "other"})
    assert not is_judged_code(claim, {**now, "gossamer.schedules.rounds": "other"})
    assert not is_judged_code(claim, {})


@pytest.mark.slow  # seven times two processes load torch
def test_killed_at_five_random_moments_it_ends_with_the_same_record(known: ClaimRecord, tmp_path: Path) -> None:
    undisturbed, path = tmp_path / "undisturbed.json", tmp_path / "toy.json"
    known.write(undisturbed)
    rng = random.Random(3)
    kept, kills = list[int](), 0
    for _ in range(40):
        asked = [sys.executable, "-W", "ignore", "-c", COMMAND, str(path)]
        with subprocess.Popen(asked, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
            if kills == 5:
                assert process.wait(120) == 0
                break
            before = _written(path)
            while process.poll() is None and _written(path) == before:
                time.sleep(0.002)  # until at least one run more is kept
            time.sleep(rng.random() * 0.01)
            os.kill(process.pid, signal.SIGKILL)
        kills += 1
        kept.append(len(ClaimRecord.read(path).runs))
    assert kills == 5
    assert kept == sorted(kept)
    assert kept[0] < len(known.runs), "it was killed in the middle"
    assert lasting(path) == lasting(undisturbed)


def test_a_process_that_is_ended_from_outside_costs_no_finished_run_and_is_told_in_a_sentence() -> None:
    future = Future[ClaimRun]()
    future.set_exception(BrokenProcessPool())
    with pytest.raises(
        ClaimInterrupted, match="every run that was finished is kept, and the same command goes on from"
    ):
        running._result(future)


def test_a_quick_look_has_no_verdict_and_no_judged_seed() -> None:
    runs = quick(toy.CLAIM, lambda run, left: None)
    assert {run.seed for run in runs} == {0}
    assert {run.settings["steps"] for run in runs if run.study == "training"} == {"6"}
    assert {run.settings["scale"] for run in runs if run.study == "numbers"} == {"0.5"}


def test_any_setting_changes_the_hash_of_the_plan() -> None:
    numbers, training = toy.CLAIM.plan["numbers"], toy.CLAIM.plan["training"]
    assert isinstance(numbers, Study)
    changed = [
        {"numbers": replace(numbers, cases={**numbers.cases, "two": {"scale": 2.5}})},
        {"numbers": replace(numbers, seeds=(30, 31, 32))},
        {"numbers": replace(numbers, quick={})},
        {"numbers": replace(numbers, measure=hash_of)},
        *(
            {"training": replace(training, **{name: value})}
            for name, value in {
                "workload": "logistic",
                "recipes": {"dense": "allreduce"},
                "steps": 31,
                "every": 5,
                "ranks": 3,
                "trials": 2,
                "tuned_steps": 10,
                "shards": "source",
                "seeds": (30,),
                "knobs": (),
                "options": {"spread": 0.0},
                "rate": hash_of,
            }.items()
        ),
    ]
    plans = [replace(toy.CLAIM, plan={**toy.CLAIM.plan, **change}) for change in changed]
    ruled = replace(toy.CLAIM.statements[0], rule="another")
    plans.append(replace(toy.CLAIM, statements=(ruled, *toy.CLAIM.statements[1:])))
    hashes = {hash_of(plan) for plan in plans}
    assert len(hashes) == len(plans)
    assert hash_of(toy.CLAIM) not in hashes
    assert hash_of(replace(toy.CLAIM, limits="a better sentence")) == hash_of(toy.CLAIM)


def test_the_record_of_another_plan_is_refused_and_its_verdicts_are_kept(known: ClaimRecord, tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    known.write(path)
    other = replace(toy.CLAIM, plan={"numbers": toy.CLAIM.plan["numbers"]})
    with pytest.raises(ClaimError, match=r"is of another plan .*--anew"):
        begun(other, path)
    fresh = begun(other, path, anew=True)
    assert (fresh.runs, fresh.done, fresh.plan) == ([], False, hash_of(other))
    assert fresh.earlier[0].verdicts == {"a": "holds", "b": "not", "c": "holds", "d": "not", "e": "waiting"}
    assert f"Plan {known.plan}" in page(fresh)


def test_a_claim_whose_code_has_changed_is_run_anew_and_its_verdicts_are_kept(
    known: ClaimRecord, tmp_path: Path
) -> None:
    path = tmp_path / "toy.json"
    known.write(path)
    assert begun(toy.CLAIM, path, anew=True).done  # nothing has changed: no verdict is given twice
    changed = replace(known, sources=dict.fromkeys(known.sources, "another"))
    changed.write(path)
    assert begun(toy.CLAIM, path).done  # stale, until somebody asks
    fresh = begun(toy.CLAIM, path, anew=True)
    assert (fresh.runs, fresh.done, fresh.plan) == ([], False, known.plan)
    assert fresh.earlier[0].verdicts["b"] == "not"
    fresh.write(path)
    assert begun(toy.CLAIM, path, anew=True) == fresh  # ended before it was through, it goes on


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "it is empty"), ("{}", "it is of no claim"), ('{"kind": "claim", "format": 9}', "it has format 9")],
)
def test_a_file_that_is_no_record_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "toy.json").write_text(text)
    with pytest.raises(ClaimError, match=says):
        begun(toy.CLAIM, tmp_path / "toy.json")


def test_the_record_of_another_claim_is_refused(known: ClaimRecord, tmp_path: Path) -> None:
    known.write(tmp_path / "toy.json")
    with pytest.raises(ClaimError, match="record of the claim 'toy', not of 'other'"):
        begun(replace(toy.CLAIM, name="other"), tmp_path / "toy.json")


def test_pages_and_figures_are_made_from_the_record_alone(known: ClaimRecord, tmp_path: Path) -> None:
    written = {path.name: path.read_text() for path in write_pages([known], tmp_path)}
    assert sorted(written) == ["index.md", "toy-numbers.svg", "toy.md"]
    assert "Verdict: **not** (expected: not)" in written["toy.md"]
    assert "4 statements judged: 2 holds, 0 partly, 2 not; 1 wait. 4 came out as expected." in index([known])
    page = written["index.md"]
    assert [line for line in page.splitlines() if line.startswith("## ")] == [
        *("## Holds: 2", "## Does not hold: 2", "## Not judged yet: 1", "## What our scale cannot show"),
    ]
    assert "| [toy](toy.md) | e. Faster. | holds | an honest clock |" in page
    assert "- [toy](toy.md): Everything." in page
    judged = [run for run in known.runs if (run.study, run.case) == ("numbers", "two")]
    assert known.figures[0].lines[0].points == [
        [x, sum(run.rows["y"][i] for run in judged) / len(judged)] for i, x in enumerate([0.0, 1.0])
    ]
    assert known.figures[0].title in written["toy-numbers.svg"]


def test_a_page_says_that_a_claim_took_too_long_and_when_it_was_confirmed(known: ClaimRecord) -> None:
    late = " ".join(page(replace(known, wall=601.0, confirmed="0123456789ab")).split())
    assert "longer than the ten minutes which a claim may take" in late
    assert "At commit 0123456789ab the runs of seed 30 came out the same." in late
    soon = " ".join(page(replace(known, wall=599.0)).split())
    assert "ten minutes" not in soon
    assert "came out the same" not in soon


PUBLISHED = Path(__file__).parents[3] / "docs" / "claims"


@pytest.mark.parametrize("name", names())
def test_every_claim_that_can_run_has_run_and_stands_in_the_docs(name: str) -> None:
    claim, known = find(name), ClaimRecord.read(PUBLISHED / "records" / f"{name}.json")
    assert (known.claim, known.done, known.plan) == (name, True, hash_of(claim))
    waiting = [s.key for s in claim.statements if s.judge is None]
    assert [s.key for s in known.statements if s.verdict == "waiting"] == waiting


def test_the_pages_in_the_docs_say_what_their_records_say(tmp_path: Path) -> None:
    """After a new record: `gossamer claims --pages docs/claims`."""
    records = [ClaimRecord.read(PUBLISHED / "records" / f"{name}.json") for name in names()]
    written = write_pages(records, tmp_path)
    assert {path.name for path in written} == {path.name for path in PUBLISHED.iterdir() if path.is_file()}
    for path in written:
        assert path.read_text() == (PUBLISHED / path.name).read_text(), path.name


def test_a_changed_method_is_seen_and_a_better_comment_is_not() -> None:
    code = "def f(x):\n    return x + 1\n\nCLAIM = 3\n"
    assert of_text(code) == of_text("# why\n" + code.replace("CLAIM = 3", "CLAIM = 4"))
    assert of_text(code) != of_text(code.replace("+ 1", "+ 2"))


def test_a_claim_that_does_not_exist() -> None:
    with pytest.raises(ClaimError, match=r"there is no claim called 'dianna'\. Did you mean 'diana'"):
        find("dianna")


@pytest.mark.parametrize("name", names())
def test_every_claim_is_whole(name: str) -> None:
    claim = find(name)
    assert claim.name == name
    assert claim.plan or all(s.waits for s in claim.statements)
    for study in claim.plan.values():
        assert not {*study.seeds} - {30, 31, 32, 33, 34}, "others were looked at when defaults were chosen"
    source = Path(sys.modules[claim.module].__file__ or "")
    assert source.read_text().count("\n") <= 120
    found = empty(claim).sources
    assert found.keys() >= {claim.module, *claim.methods}
    assert "" not in found.values(), "a method's module is not there"


@pytest.mark.parametrize(
    ("name", "module"), [("powersgd", "powersgd"), ("accordion", "powersgd"), ("terngrad", "ternary")]
)
def test_a_verdict_stands_on_the_codecs_of_its_recipes(name: str, module: str) -> None:
    assert f"gossamer.codecs.{module}" in sources(find(name))


def test_a_verdict_of_a_contest_stands_on_what_its_parts_extend() -> None:
    found = sources(find("powersgd"))
    assert "gossamer.memories.residual" in found  # of error feedback
    assert not any(module.startswith("gossamer.core.") for module in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_a_quick_look_at_every_claim_runs_to_its_end(name: str) -> None:
    claim = find(name)
    assert bool(quick(claim, lambda run, left: None)) == bool(claim.plan)


def test_the_commit_of_another_project_in_which_gossamer_is_installed_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is missing")
    module = import_module("gossamer.bench.claims.sources")
    installed = tmp_path / ".venv" / "gossamer" / "sources.py"
    installed.parent.mkdir(parents=True)
    installed.touch()
    monkeypatch.setattr(module, "__file__", str(installed))
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "theirs"]):
        subprocess.run([*git, *words], check=True, timeout=60)
    assert module.commit() == ""
    for words in (["add", "-f", str(installed)], ["commit", "-q", "-m", "a checkout"]):
        subprocess.run([*git, *words], check=True, timeout=60)
    assert len(module.commit()) == 12
