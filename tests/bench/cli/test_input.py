"""Wrong input: one clear line, exit code 2, and nothing started. Commands run in this process, which takes milliseconds."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gossamer.bench.record import FORMAT, Record, Run, Step
from gossamer.bench.workloads import DataError
from gossamer.core.errors import GossamerError
from gossamer.recipes import presets

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(say: Say, monkeypatch: pytest.MonkeyPatch) -> Say:
    """And no ranks are started, whatever is said."""

    def never(*args: object) -> None:
        raise AssertionError("ranks were started")

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("gossamer.bench.cli.compare.launch", never)
    return say


WRONG = [
    ("nonsense", "No such command"),
    ("train", "Missing argument"),
    ("train terngrd", "there is no recipe 'terngrd'. Did you mean 'terngrad'?"),
    ("train qsgd(bits=99)", "bits"),
    ("train qsgd(", "'qsgd(' cannot be read: '(' was never closed. A recipe looks like"),
    ("train terngrad --bogus", "No such option: --bogus"),
    ("train terngrad --hosts 0", "--hosts"),
    ("train terngrad --hosts two", "--hosts"),
    ("train terngrad --steps 0", "--steps"),
    ("train terngrad --steps -3", "--steps"),
    ("train terngrad --checkpoint-every 0", "--checkpoint-every"),
    ("train terngrad --deadline 0", "--deadline"),
    ("train terngrad --workload rigde", "there is no workload called 'rigde'. Did you mean 'ridge'?"),
    ("train terngrad --workload ridge --shards moon", "ridge has no shards 'moon'"),
    ("train terngrad --workload ridge --rate 200", "did you mean '200mbit'?"),
    ("train terngrad --workload ridge --rate fast", "'fast' is not a rate"),
    ("train terngrad --workload ridge --rate 0mbit", "is not between 10kbit and 100gbit"),
    ("train terngrad --workload ridge --rate -1gbit", "'-1gbit' is not a rate"),
    ("train terngrad --workload ridge --rate 1gbit,2gbit,3gbit", "3 rates for 4 hosts"),
    ("train terngrad --workload ridge --rate 1gbit,1gbit", "2 rates for 4 hosts"),
    ("train terngrad --workload ridge --rate 200mbit,", "rate 2 of 2 in '200mbit,' is empty"),
    ("train terngrad --workload ridge --rate 200mbit/", "'200mbit/' has no rate after its '/'"),
    ("compare ddp --workload ridge --rate 200", "did you mean '200mbit'?"),
    ("train terngrad --resume", "--resume needs --out"),
    ("train terngrad --resume --out empty", "no checkpoint in empty/checkpoint; run without --resume first"),
    ("train nowhere.toml", "nowhere.toml cannot be read: No such file"),
    ("train folder.toml", "folder.toml cannot be read: Is a directory"),
    ("train noise.toml", "noise.toml is not valid TOML"),
    ("train broken.toml", "broken.toml is not valid TOML"),
    ("train wrong.toml", "wrong.toml: a recipe file has no entry 'exchnge'"),
    ("train blank.toml", "blank.toml: a recipe needs an exchange"),
    ("train biased.toml", "biased.toml: gather(topk()) is biased"),
    ("train loop.toml", "loop.toml cannot be read: Too many levels of symbolic links"),
    ("train link.toml", "link.toml: qsgd: bits"),
    ("compare ddp blank.toml", "blank.toml: a recipe needs an exchange"),
    ("recipes blank.toml", "blank.toml: a recipe needs an exchange"),
    ("bench steps blank.toml", "blank.toml: a recipe needs an exchange"),
    ("compare", "Missing argument"),
    ("compare ddp terngrd", "there is no recipe 'terngrd'"),
    ("compare ddp --patience 0.5", "--patience"),
    ("compare ddp --compute 150ms", "no quality can be compared: add --timing to compare steps"),
    ("compare ddp --timing --compute 150", "--compute takes a time such as '150ms' or '0.3s'"),
    ("compare ddp --script wrong.toml --compute 150ms", "--compute has no effect with --script: the script computes"),
    ("compare ddp --script wrong.toml --timing", "--timing has no effect with --script: a script's steps are timed"),
    ("train ddp --compute 0ms", "--compute must be between 1ms and 60s, not 0ms"),
    ("bench steps --compute fast", "--compute takes a time such as '150ms' or '0.3s'"),
    ("compare ddp --chunk 0", "--chunk"),
    ("recipes nonsense", "there is no recipe 'nonsense'"),
    ("recipes ddp", "'ddp' is a baseline"),
    ("recipes terngrad --parameters 0", "--parameters"),
    ("report nowhere", "nowhere cannot be read"),
    ("report broken.toml", "is not a record of a run"),
    ("report list.json", "is not a record of a run"),
    ("report folder.toml", "folder.toml/record.json cannot be read: No such file"),
    ("report empty.json", "empty.json is not a record of a run: it is empty"),
    ("report cut.json", "it is not JSON, or was cut off at line 1"),
    ("report noise.toml", "noise.toml is not a record of a run: it is not text"),
    ("report bare.json", "bare.json is not a record of a run: it has no 'runs'"),
    ("report odd.json", "odd.json is not a record of a run: what is in it is not what a run writes"),
    ("report deep.json", "deep.json is not a record of a run: what is in it is not what a run writes"),
    ("report loop.toml", "loop.toml cannot be read: Too many levels of symbolic links"),
    (f"report {'x' * 300}", f"{'x' * 300} cannot be read: File name too long"),
    ("lab", "no command to run"),
    ("lab --rat 5mbit -- true", "gossamer lab has no option '--rat'; its options come first"),
    ("lab --rate 5mb -- true", "'5mb' is not a rate"),
    ("lab --hosts 4 --rate 1gbit,1gbit -- true", "2 rates for 4 hosts"),
    ("lab --hosts 0 -- true", "--hosts"),
    ("lab --hosts 300 -- true", "300 hosts: a lab has between 1 and 250"),
    ("lab --timeout 0 -- true", "timeout 0: give seconds above 0"),
    ("lab --timeout -1 -- true", "timeout -1: give seconds above 0"),
    ("lab --latency soon -- true", "'soon' is not a delay"),
    ("bench steps --rates fast", "'fast' is not a rate"),
    ("bench steps nonsense", "there is no recipe 'nonsense'"),
    ("bench kernels --elements 0", "--elements"),
    ("bench noise nonsense", "there is no recipe 'nonsense'"),
    ("bench noise --ranks 1", "--ranks"),
    ("bench noise --ranks 100000000", "--ranks"),
    ("bench kernels --elements 1000000000000", "--elements"),
    ("heterogeneity --ranks 100000000", "--ranks"),
    ("plan deep.json --step 1s --rate 1gbit", "deep.json is no list of shapes"),
    ("plan gpt2 --step 1s --cluster deep.toml", "deep.toml is not TOML"),
    ("plan gpt2 --step 1s --cluster digits.toml", "digits.toml is not TOML"),
    (f"simulate ridge --step 1s --rate 1gbit --events random:{'9' * 5000}", "random:SEED takes a whole number"),
    ("simulate ridge --rate 1gbit --events random:1 --losses 1000000000", "--losses"),
    (f"tune qsgd --budget {'9' * 400}", "is not a number of bytes"),
    ("tune qsgd --workload ridge --knob lr=1,inf", "the learning rate is searched in positive multiples"),
    (f"claims ef21 --confirm --records {'x' * 300}", "File name too long"),
]


@pytest.mark.parametrize(("words", "what"), WRONG)
def test_wrong_input_is_one_line_and_exit_code_2(say: Say, tmp_path: Path, words: str, what: str) -> None:
    (tmp_path / "broken.toml").write_text("recipe = [")
    (tmp_path / "wrong.toml").write_text("exchnge = 'scatter(bf16())'")
    (tmp_path / "noise.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "blank.toml").touch()
    (tmp_path / "biased.toml").write_text("exchange = 'gather(topk())'")
    (tmp_path / "bits").write_text("recipe = 'qsgd(bits=99)'")
    (tmp_path / "link.toml").symlink_to("bits")
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "deep.toml").write_text("x = " + "[" * 100_000)
    (tmp_path / "digits.toml").write_text("x = " + "9" * 5000)
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "empty.json").touch()
    (tmp_path / "cut.json").write_text('{"format": 2, "runs": [')
    (tmp_path / "bare.json").write_text(json.dumps({"format": FORMAT}))
    (tmp_path / "odd.json").write_text(json.dumps({"format": FORMAT, "runs": []}))
    before = set(tmp_path.iterdir())
    code, out, err = say(*words.split())
    assert (code, out) == (2, "")
    assert err.startswith("gossamer: ")
    assert what in err
    assert len(err.splitlines()) == 1
    assert set(tmp_path.iterdir()) == before


def test_steps_are_measured_at_some_rate(say: Say) -> None:
    code, out, err = say("bench", "steps", "--rates", " ")
    assert (code, out) == (2, "")
    assert err.startswith("gossamer: --rates names no rate")


def test_without_a_command_one_is_told_what_there_is(say: Say) -> None:
    for words, command in (((), "compare"), (("bench",), "kernels")):
        code, out, err = say(*words)
        assert (code, err) == (2, "")
        assert "Usage: " in out
        assert command in out


def test_data_that_cannot_be_had_is_no_wrong_input(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: object) -> None:
        raise DataError("the package could not be fetched: put the file there")

    monkeypatch.setattr("gossamer.bench.workloads.Ridge.load", missing)
    code, _, err = say("train", "terngrad", "--workload", "ridge")
    assert (code, err) == (1, "gossamer: the package could not be fetched: put the file there\n")


@pytest.mark.parametrize(
    "words", ["train terngrad --workload ridge --out file/x", "compare ddp --workload ridge --out file"]
)
def test_a_folder_that_cannot_be_made_is_told_before_anything_runs(say: Say, tmp_path: Path, words: str) -> None:
    (tmp_path / "file").touch()
    code, _, err = say(*words.split())
    assert code == 1
    assert re.fullmatch(r"gossamer: the folder file(/x)? cannot be made: .*; give another one with --out\n", err)


def test_a_folder_that_cannot_be_written_to_is_told_before_anything_runs(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    code, _, err = say("train", "terngrad", "--workload", "ridge", "--out", "locked")
    assert (code, err) == (1, "gossamer: the folder locked cannot be written to; give another one with --out\n")


def test_a_rate_is_not_for_ranks_that_a_launcher_has_started(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = say("train", "terngrad", "--workload", "ridge", "--rate", "1gbit")
    assert code == 2
    assert "a launcher has started them" in err


def test_a_slow_rank_is_one_of_those_that_a_launcher_has_started(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = say("train", "terngrad", "--workload", "ridge", "--slow", "3:200")  # --hosts is 4 by default
    assert code == 2
    assert "there is no rank 3 among 2" in err


@pytest.mark.parametrize("command", ["train bf16 --workload ridge", "compare ddp --script train.py"])
def test_ranks_that_a_launcher_has_started_fill_their_hosts(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    code, _, err = say(*command.split(), "--per-host", "3")
    assert (code, err) == (2, "gossamer: --per-host 3 does not divide the 4 ranks of the launcher\n")


@pytest.mark.parametrize("command", ["train bf16 --workload ridge", "compare ddp --script train.py", "doctor --quick"])
@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "abc"), ("WORLD_SIZE", ""), ("LOCAL_RANK", "-"), ("MASTER_PORT", "1e4")]
)
def test_what_a_launcher_has_set_and_is_no_number_is_named(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str, value: str
) -> None:
    (tmp_path / "train.py").touch()
    for each, text in {"RANK": "0", "WORLD_SIZE": "2", name: value}.items():
        monkeypatch.setenv(each, text)
    code, out, err = say(*command.split())
    assert (code, out) == (2, "")
    assert err == (
        f"gossamer: the environment variable {name} is {value!r}, not a number: set it as torchrun does, or unset RANK where no "
        "launcher has started this process\n"
    )


def test_compare_is_not_for_ranks_that_a_launcher_has_started(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = say("compare", "ddp", "terngrad", "--workload", "ridge")
    assert code == 2
    assert "compare starts its own ranks" in err


def test_a_run_that_could_not_go_on_leaves_the_record_of_the_earlier_one(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object) -> tuple[Record, int]:
        record = some_record()
        record.runs = [Run("qsgd", "qsgd", "failed", "it is of another run")]
        return record, 1

    monkeypatch.setattr("gossamer.bench.cli.compare.launch", refused)
    earlier = some_record()
    earlier.runs = [Run("terngrad", "terngrad", steps=[Step(1, 0.1, 2.0, 10)])]
    (tmp_path / "x" / "checkpoint").mkdir(parents=True)
    (tmp_path / "x" / "checkpoint" / "step1-rank0.pt").touch()
    earlier.write(tmp_path / "x" / "record.json")
    words = ("train", "qsgd", "--workload", "ridge", "--out", "x")
    code, out, err = say(*words, "--resume")
    assert (code, "it is of another run" in out) == (1, True)
    assert err.endswith("record and report in x are still those of the earlier run\n")
    assert Record.read(tmp_path / "x" / "record.json") == earlier
    assert say(*words)[0] == 1  # but one that begins anew
    assert Record.read(tmp_path / "x" / "record.json").runs == refused()[0].runs


def test_a_resumed_run_keeps_the_commands_that_do_it_all_again(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(plan: Any, hosts: int, rate: Any, command: str, *more: Any) -> tuple[Record, int]:
        record = some_record()
        record.command, record.runs = command, [Run("qsgd", "qsgd", steps=[Step(1, 0.1, 2.0, 10)])]
        return record, 0

    monkeypatch.setattr("gossamer.bench.cli.compare.launch", launch)
    words = ("train", "qsgd", "--workload", "ridge", "--out", "x")
    assert say(*words)[0] == 0
    (tmp_path / "x" / "checkpoint").mkdir()
    (tmp_path / "x" / "checkpoint" / "step1-rank0.pt").touch()
    for _ in range(2):
        assert say(*words, "--resume")[0] == 0
    first = "gossamer train qsgd --workload ridge --out x"
    assert Record.read(tmp_path / "x" / "record.json").command == f"{first}\n{first} --resume"
    assert say(*words)[0] == 0  # one that begins anew
    assert Record.read(tmp_path / "x" / "record.json").command == first


def test_results_that_cannot_be_written_are_shown_all_the_same(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = some_record()
    record.runs = [Run("ddp", "ddp", steps=[Step(1, 0.1, 2.0, 10)])]
    monkeypatch.setattr("gossamer.bench.cli.compare.launch", lambda *args: (record, 0))

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    code, out, err = say("compare", "ddp", "--workload", "ridge", "--out", "x")
    assert (code, "ddp" in out) == (1, True)
    assert (
        err
        == "gossamer: the report could not be written to x: No space left on device; the earlier files are unchanged\n"
    )
    assert not list((tmp_path / "x").iterdir())


def test_a_file_that_may_not_be_looked_at_is_one_line() -> None:
    """Root may look at all files, so the error is made here."""
    script = (
        "import sys\n"
        "from gossamer.bench.cli import list_cache, main\n"
        "def denied():\n"
        "    raise PermissionError(13, 'Permission denied', '/root/x')\n"
        "list_cache.presets, sys.argv[1:] = denied, ['recipes']\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "gossamer: /root/x: Permission denied\n")


def test_an_error_of_our_own_making_is_not_swallowed(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("gossamer.bench.cli.list_cache.presets", wrong)
    with pytest.raises(ZeroDivisionError):
        say("recipes")
    assert not issubclass(ZeroDivisionError, GossamerError)


def test_all_recipes_are_listed_one_a_line_in_a_pipe(say: Say) -> None:
    code, out, _ = say("recipes")
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(presets())]] == list(presets())
    assert "\x1b" not in out


@pytest.mark.parametrize("name", [*presets(), "scatter(qsgd(bits=4)) + slowmo(every=12)"])
def test_every_recipe_can_be_explained(say: Say, name: str) -> None:
    code, out, _ = say("recipes", name, "--json", "--parameters", "40000")
    facts = json.loads(out)
    assert code == 0
    assert facts["sent_bytes_per_step"] > 0
    assert {"exchange", "mixer", "quorum"} & {p["kind"] for p in facts["parts"]}
    assert all(p["summary"] for p in facts["parts"])
    assert name not in presets() or facts["paper"]
    code, text, _ = say("recipes", name, "--parameters", "40000")
    assert code == 0
    assert facts["expression"] in text
    assert all(p["text"] in text for p in facts["parts"])


def test_the_bytes_of_a_recipe_follow_the_size_asked_for(say: Say) -> None:
    small, large = (
        json.loads(say("recipes", "bf16", "--json", "--parameters", n)[1])["sent_bytes_per_step"]
        for n in ("1000000", "4000000")
    )
    assert large == pytest.approx(4 * small, rel=0.01)
    assert small == pytest.approx(2 * 3 / 4 * 2e6, rel=0.01)  # two bytes each, there and back, 4 ranks


def test_kernels_are_measured_in_rows(say: Say) -> None:
    code, out, _ = say("bench", "kernels", "--elements", "4096", "--rounds", "1", "--json")
    rows = json.loads(out)
    assert code == 0
    assert all(r.keys() == {"kernel", "backend", "elements", "gb_per_s", "ratio_to_memcpy"} for r in rows)
    assert all(r["elements"] == 4096 and r["gb_per_s"] > 0 and r["ratio_to_memcpy"] > 0 for r in rows)
    assert "ternary.encode" in {r["kernel"] for r in rows}


def test_noise_is_measured_in_rows_of_rising_bits(say: Say) -> None:
    words = ("bench", "noise", "bf16", "scatter(eden(2))", "--workload", "ridge", "--ranks", "2", "--at", "1", "--json")
    code, out, _ = say(*words)
    rows = json.loads(out)
    assert code == 0
    assert all(r.keys() == {"recipe", "bits", "message", "mean"} for r in rows)
    assert {r["recipe"] for r in rows} == {"scatter(eden(2))", "bf16"}
    assert rows[0]["bits"] <= rows[1]["bits"]
    assert say(*words[:-1])[1].startswith("recipe")
    globbed = """scatter(bf16()) + rule("name != '[/x]*'", scatter(fp16()))"""
    assert globbed in say("bench", "noise", globbed, *words[4:-1])[1]


def some_record() -> Record:
    return Record(
        "gossamer compare", "2026-01-01T00:00:00+00:00", "ridge", "a workload", "loss", True, 32, 2, "unshaped", 0
    )


def test_a_report_is_made_of_a_folder_or_its_record(say: Say, tmp_path: Path) -> None:
    some_record().write(tmp_path / "record.json")
    code, out, _ = say("report", ".", "--out", "page.html")
    assert (code, out) == (0, "page.html\n")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert say("report", "record.json")[0] == 0
    assert (tmp_path / "report.html").exists()
    code, out, _ = say("report", "record.json", "--markdown")
    assert (code, "gossamer compare" in out) == (0, True)


def test_a_report_that_cannot_be_written_leaves_the_old_one(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some_record().write(tmp_path / "record.json")
    assert say("report", ".")[0] == 0
    before = (tmp_path / "report.html").read_text()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    code, _, err = say("report", ".")
    assert (code, err) == (1, "gossamer: report.html could not be written: No space left on device\n")
    assert (tmp_path / "report.html").read_text() == before
    assert len(list(tmp_path.iterdir())) == 2  # and nothing half-written


def test_a_model_of_a_script_that_ends_itself_is_one_line(say: Say, tmp_path: Path) -> None:
    (tmp_path / "ends_itself.py").write_text("raise SystemExit(3)\n")
    code, out, err = say("plan", "ends_itself:Net", "--step", "1s", "--rate", "1gbit")
    assert (code, out, err) == (2, "", "gossamer: ends_itself:Net cannot be built: SystemExit: 3\n")
