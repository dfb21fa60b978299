"""`gossamer simulate`: what a user reads, the same as JSON, and what is refused."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gossamer.bench.cli import simulate
from gossamer.bench.workloads import Workload
from gossamer.core.errors import PeerError
from gossamer.planning.model_cost import ModelCost

Say = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[3]
DIGITS = ("simulate", "digits", "--workers", "4", "--rate", "10mbit", "--step", "10ms", "--rounds", "3")


def test_it_tells_losses_by_virtual_seconds_and_bytes(say: Say) -> None:
    code, out, err = say(*DIGITS, "--recipe", "allreduce", "--recipe", "local_sgd(4)", "--free-work", "--json")
    assert (code, err) == (0, "")
    dense, local = json.loads(out)
    assert (dense["steps"], local["steps"]) == (3, 12)
    ring = 6 * 100e-6 + 6 / 4 * 4 * 4810 / (1.25e6 * 0.956 * 0.96)  # the model of 4,810 parameters is one bucket
    assert dense["seconds"] == pytest.approx(3 * (0.010 + ring + 3e-4), rel=0.02)
    assert dense["sent"] == pytest.approx(local["sent"])
    assert [point["step"] for point in dense["curve"]] == [1, 2, 3]
    assert dense["curve"][-1]["seconds"] == dense["seconds"]
    assert dense["curve"][0]["loss"] > local["curve"][-1]["loss"]
    assert sorted(dense["lines"]) == ["0", "1", "2", "3"]
    assert {kind for kind, _, _ in dense["lines"]["0"]} == {"computing", "sending", "waiting"}
    assert say(*DIGITS, "--recipe", "allreduce", "--recipe", "local_sgd(4)", "--free-work", "--json")[1] == out


def test_it_shows_a_row_for_each_recipe(say: Say) -> None:
    code, out, _ = say(*DIGITS, "--recipe", "qsgd", "--recipe", "sgp")
    assert code == 0
    assert out.startswith("digits on 4 virtual ranks, 10 Mbit/s, 100 us a message")
    for word in ("qsgd: loss ", "sgp: loss ", "held-out accuracy", "waiting"):
        assert word in out, word


def test_a_law_makes_it_wait_for_the_slow_rank(say: Say) -> None:
    """One rank computes three times as long, and the average waits for it at every step."""
    plain, slow = (json.loads(say(*DIGITS, "--free-work", "--json", *law)[1])[0] for law in ((), ("--law", "slow 3")))
    assert slow["seconds"] == pytest.approx(plain["seconds"] + 3 * 2 * 0.010)
    assert [point["loss"] for point in slow["curve"]] == [point["loss"] for point in plain["curve"]]


def test_events_are_told_and_take_their_time(say: Say, tmp_path: Path) -> None:
    path = tmp_path / "events.toml"
    path.write_text('[[event]]\nkind = "slow"\nat = 2\nrank = 1\nfactor = 6\nsteps = 1\n')
    plain, slow = (
        json.loads(say(*DIGITS, "--free-work", "--json", *events)[1])[0] for events in ((), ("--events", str(path)))
    )
    assert (plain["events"], slow["events"]) == ([], ["rank 1 computes 6 times as long in 1 steps, from step 2 on"])
    assert slow["seconds"] == pytest.approx(plain["seconds"] + 5 * 0.010)
    assert [point["loss"] for point in slow["curve"]] == [point["loss"] for point in plain["curve"]]


def test_losses_are_those_of_the_step_also_where_a_rank_leaves_steps_out(say: Say, tmp_path: Path) -> None:
    """Three of four gradients close a step of `backup`: those of the slow rank come too late, and it follows the others."""
    path = tmp_path / "events.toml"
    path.write_text('[[event]]\nkind = "slow"\nrank = 0\nfactor = 20\nsteps = 50\n')
    asked = (*DIGITS[:-1], "20", "--free-work", "--json", "--recipe", "backup", "--events", str(path))
    (run,) = json.loads(say(*asked)[1])
    assert [point["step"] for point in run["curve"]] == [*range(1, 21)]
    assert 3 * 20 < run["gradients"] < 4 * 20


def test_a_step_is_measured_with_the_batches_that_are_trained(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    measured, seen = simulate.measured, list[int]()

    def noted(task: Workload) -> ModelCost:
        seen.append(task.batch_size)
        return measured(task)

    monkeypatch.setattr(simulate, "measured", noted)
    asked = ("simulate", "digits", "--workers", "4", "--rate", "10mbit", "--rounds", "1", "--free-work")
    assert say(*asked, "--batch-size", "7")[0] == 0
    assert seen == [7]


def drawn_by(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The batches that ranks draw from now on, by number and rank."""
    drawn, batch = list[tuple[int, int]](), Workload.batch

    def noted(task: Workload, step: int, rank: int, size: int) -> Any:
        drawn.append((step, rank))
        return batch(task, step, rank, size)

    monkeypatch.setattr(Workload, "batch", noted)
    return drawn


def test_micro_batches_of_a_step_are_different_batches(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were the same one over and over, so that more of them changed nothing."""
    drawn = drawn_by(monkeypatch)
    assert say(*DIGITS, "--free-work", "--recipe", "minibatch(2)")[0] == 0
    for rank in range(4):
        assert [number for number, place in drawn if place == rank] == [0, 1, 2, 3, 4, 5]


LOST = '[[event]]\nkind = "die"\nat = 6\nrank = 1\nback = "2 s"\n'


def test_a_rank_that_is_lost_makes_all_start_again_from_a_checkpoint(say: Say, tmp_path: Path) -> None:
    path = tmp_path / "events.toml"
    path.write_text(LOST)
    few = (*DIGITS[:-1], "10", "--free-work", "--save-every", "4", "--saving", "100ms", "--restart", "3s")
    (plain,), (lost,) = (json.loads(say(*few, "--json", *words)[1]) for words in ((), ("--events", str(path))))
    assert lost["curve"][-1]["loss"] == plain["curve"][-1]["loss"]
    (restart,) = lost["restarts"]
    assert (restart["done"], restart["again"], restart["present"]) == (4, 1, [0, 1, 2, 3])
    one = plain["seconds"] / 10
    assert lost["seconds"] == pytest.approx(plain["seconds"] + 2 * 0.1 + 3.0 + one, abs=one)
    assert lost["sent"] > plain["sent"]
    code, out, _ = say(*few, "--events", str(path))
    assert code == 0
    assert "event: rank 1 is lost, for 2 s, at step 6" in out
    assert "after 3 s 4 ranks went on from step 5, and 1 steps were made again" in " ".join(out.split())


def test_a_restart_goes_on_with_the_micro_batches_of_its_step(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, drawn = tmp_path / "events.toml", drawn_by(monkeypatch)
    path.write_text(LOST)
    few = (*DIGITS[:-1], "8", "--free-work", "--save-every", "4", "--recipe", "minibatch(2)", "--events", str(path))
    assert say(*few)[0] == 0
    assert sorted({number for number, _ in drawn}) == [*range(16)]
    assert [number for number, place in drawn if place == 0][-8:] == [*range(8, 16)]


def test_members_go_on_beside_restarts(say: Say, tmp_path: Path) -> None:
    path = tmp_path / "events.toml"
    path.write_text(LOST.replace('"2 s"', '"100 ms"'))
    long = (
        *DIGITS[:-3],
        "200ms",
        "--rounds",
        "20",
        "--free-work",
        "--events",
        str(path),
        "--save-every",
        "4",
        "--saving",
        "100ms",
    )
    both = (*long, "--restart", "2s", "--on-loss", "both")
    restarted, kept = json.loads(say(*both, "--json")[1])
    assert (restarted["on_loss"], kept["on_loss"]) == ("restart", "members")
    assert (restarted["changes"], kept["restarts"]) == ([], [])
    lost, back = kept["changes"]
    assert (lost["lost"], lost["present"], lost["dropped"], lost["step"]) == ([1], [0, 2, 3], 3, 6)
    assert (back["came"], back["present"]) == ([1], [0, 1, 2, 3])
    assert kept["gradients"] == 20 * 4 - (back["step"] - lost["step"])
    assert restarted["gradients"] == 20 * 4
    assert kept["steps_an_hour"] == pytest.approx(3600 * 20 / kept["seconds"])
    code, out, _ = say(*both)
    words = " ".join(out.split())
    assert code == 0
    assert "allreduce: rank 1 lost at " in words
    assert "3 ranks went on with step 6, and 3 gradients were dropped" in words
    assert say(*both)[1] == out


def test_losses_are_drawn_and_repeat(say: Say) -> None:
    words = (
        *DIGITS[:-1],
        "30",
        "--free-work",
        "--events",
        "random:1",
        "--losses",
        "2",
        "--restart",
        "0s",
        "--on-loss",
        "members",
    )
    code, out, _ = say(*words)
    assert code == 0
    assert " ".join(out.split()).count(" is lost, for ") == 2
    assert say(*words)[1] == out


def test_events_of_a_seed_repeat(say: Say) -> None:
    first, second, other = (say(*DIGITS, "--free-work", "--events", f"random:{seed}")[1] for seed in (1, 1, 2))
    assert first == second != other
    assert "event: a message is 200 ms late with chance" in first


def test_a_broken_file_of_events_is_refused(say: Say, tmp_path: Path) -> None:
    path = tmp_path / "e.toml"
    path.write_text('[[event]]\nkind = "slow"\nrank = 4\nfactor = 6\nsteps = 1\n')
    code, out, err = say(*DIGITS, "--events", str(path))
    assert (code, out) == (2, "")
    assert "e.toml, line 3: rank must lie from 0 to 3, not 4" in " ".join(err.split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("gpt2", "--rate", "10mbit"), "only workloads can be simulated, and 'gpt2' is none"),
        (("digits",), "the cluster's links are missing: give --rate"),
        (("digits", "--rate", "0mbit"), "'0mbit' must be more than 0"),
        (("digits", "--rate", "10mbit", "--workers", "1000"), "digits has 1437 training rows, and 1000 ranks with 4 each need 4000"),
        (("digits", "--rate", "10mbit", "--recipe", "no_such"), "no_such"),
        (("digits", "--rate", "10mbit", "--step", "1ms", "--events", "random:x"), "takes a whole number, such as random:1, not 'random:x'"),
        (("digits", "--rate", "10mbit", "--step", "1ms", "--events", "none.toml"), "none.toml cannot be read: No such file"),
        (("digits", "--rate", "10mbit", "--step", "1ms", "--events", "random:1", "--losses", "1", "--recipe", "ad_psgd", "--on-loss", "members"), "cannot go on without a lost rank; use every_step()"),
        (("digits", "--rate", "10mbit", "--step", "1ms", "--events", "none.toml", "--losses", "1"), "--losses 1 is for --events random:SEED; write the losses into none.toml"),
        (("digits", "--rate", "10mbit", "--step", "1ms", "--losses", "2"), "--losses 2 is for --events random:SEED; add it"),
        (("digits", "--rate", "10mbit", "--law", "slow"), "'slow' is no law of computing: write 'constant'"),
        (("digits", "--cluster", "c.toml", "--law", "slow 2"), "--law and --cluster both describe the cluster"),
        (("digits", "--rate", "10mbit", "--step", "1ms", "--memory", "100 kB"), "8 ranks do not fit into 100 kB; lower --workers"),
    ],
)  # fmt: skip
def test_what_cannot_be_simulated_is_refused(words: tuple[str, ...], says: str, say: Say) -> None:
    code, out, err = say("simulate", *words)
    assert (code, out) == (2, "")
    assert says in " ".join(err.split())


def test_too_many_ranks_are_refused_with_what_each_recipe_would_take(say: Say) -> None:
    both = ("--recipe", "allreduce", "--recipe", "topk", "--memory", "100 kB")
    _, _, err = say(*DIGITS, *both)
    rows = [line.split() for line in err.splitlines() if line.startswith("  ")]
    assert [row[0] for row in rows] == ["allreduce:", "topk:"]
    assert float(rows[0][1]) < float(rows[1][1])  # which keeps a residual


def test_memory_that_only_holds_files_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has read its data for days has little that nobody uses; and a Mac does not say."""
    (tmp_path / "meminfo").write_text("MemTotal:  64000000 kB\nMemFree:  90000 kB\nMemAvailable:  50000000 kB\n")
    monkeypatch.setattr(simulate, "MEMORY", tmp_path / "meminfo")
    assert simulate._allowed(None) == 25_000_000 * 1024
    monkeypatch.setattr(simulate, "MEMORY", tmp_path / "none")
    assert simulate._allowed(None) == float("inf")


def test_a_cluster_of_another_size_is_refused(say: Say, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('format = 1\n[[hosts]]\ncount = 3\nup = "10 Mbit/s"\n')
    code, _, err = say("simulate", "digits", "--cluster", str(path), "--workers", "4")
    assert code == 2
    assert "c.toml describes 3 ranks, and --workers asks for 4; make them equal" in " ".join(err.split())


def test_a_step_on_gpus_is_not_measured_on_this_processor(say: Say, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('format = 1\nbackend = "nccl"\n[[hosts]]\ncount = 2\nup = "1 Gbit/s"\n')
    asked = ("simulate", "digits", "--cluster", str(path), "--workers", "2", "--rounds", "1", "--free-work")
    code, out, err = say(*asked)
    assert (code, out) == (2, "")
    assert "the cluster has GPUs: say how long it takes there, with --step" in " ".join(err.split())
    assert say(*asked, "--step", "1ms")[0] == 0


def test_what_was_trained_before_a_recipe_fails_is_told(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = simulate.simulated

    def fails(recipe: str, *of: Any) -> simulate.Simulated:
        if recipe == "topk":
            raise PeerError("rank 2 is lost")
        return trained(recipe, *of)

    monkeypatch.setattr(simulate, "simulated", fails)
    code, out, err = say(*DIGITS, "--recipe", "qsgd", "--recipe", "topk", "--free-work", "--json")
    assert code != 0
    assert [run["recipe"] for run in json.loads(out)] == ["qsgd"]
    assert "rank 2 is lost" in err


def test_a_loss_that_ran_away_is_null_in_json_which_knows_no_nan(say: Say) -> None:
    def is_none(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    out = say(*DIGITS, "--recipe", "allreduce + every_step(rate=1e30)", "--free-work", "--json")[1]
    (run,) = json.loads(out, parse_constant=is_none)
    assert [point["loss"] is None for point in run["curve"]] == [False, True, True]


def test_long_times_are_in_digits(say: Say) -> None:
    """Of hours there were powers of ten: 1.5e+04."""
    _, out, _ = say(*DIGITS[:4], "--rate", "10mbit", "--step", "5000s", "--rounds", "3", "--free-work")
    assert "15000" in out
    assert "e+" not in out


def test_what_the_page_shows_of_ranks_that_are_lost_leave_and_come_is_what_its_command_prints(
    say: Say, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "simulator.md").read_text().partition("### Ranks that are lost, leave, or come\n")[2]
    events, command, shown = re.findall(r"```(?:toml|bash|text)\n(.*?)```", page, re.DOTALL)[:3]
    (tmp_path / "spot.toml").write_text(events)
    words = command.replace("\\\n", "").replace("spot.toml", str(tmp_path / "spot.toml")).split()[1:]
    code, out, _ = say(*words)
    assert code == 0
    assert " ".join(shown.split()) in " ".join(out.split())


@pytest.mark.slow
def test_what_the_page_shows_of_the_others_that_go_on_is_what_its_command_prints(say: Say) -> None:
    page = (ROOT / "docs" / "simulator.md").read_text().partition("### The others go on\n")[2]
    command, shown = re.findall(r"```(?:bash|text)\n(.*?)```", page, re.DOTALL)[:2]
    code, out, _ = say(*shlex.split(command.replace("\\\n", ""))[1:])
    assert code == 0
    rows = re.findall(r"^\| ((?:allreduce|local_sgd).*) \|$", page.partition("```text")[0], re.MULTILINE)
    assert len(rows) == 4
    for cells in (row.split(" | ") for row in rows):
        assert re.search(".*".join(map(re.escape, cells)), out), cells
    lines = [" ".join(line.split()) for line in re.split(r"(?m)^(?=allreduce: )|^\.\.\.$", shown)]
    assert [line for line in lines if line not in " ".join(out.split())] == []
