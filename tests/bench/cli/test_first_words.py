"""What people try first."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import gossamer
from gossamer.bench import workloads
from gossamer.bench.cli import app, list_cache
from gossamer.bench.lab import LabResult
from gossamer.recipes import presets

Say = Callable[..., tuple[int, str, str]]


def test_it_says_which_version_it_is(say: Say) -> None:
    assert say("--version") == (0, f"gossamer {gossamer.__version__}\n", "")


@pytest.mark.parametrize("words", [("-h",), ("compare", "-h"), ("bench", "steps", "-h")])
def test_a_short_word_helps_as_the_long_one_does(say: Say, words: tuple[str, ...]) -> None:
    code, out, _ = say(*words)
    assert code == 0
    assert out == say(*words[:-1], "--help")[1]
    assert "Usage:" in out


@pytest.mark.parametrize(
    "words", [("--rate", "200mbit"), ("--workload", "lm"), ("--parameters", "1000"), ("--hosts", "8")]
)
def test_bytes_are_of_some_recipe(say: Say, words: tuple[str, str]) -> None:
    code, out, err = say("recipes", *words)
    assert (code, out) == (2, "")
    assert f"{words[0]} counts the bytes of one recipe: name it" in err


LIGHT = ["--help", "-h", "--version", "recipes", "recipes --json", "recipes --help", "workloads", "workloads --json"]


def test_what_is_asked_first_does_not_wait_for_torch() -> None:
    script = (
        "import sys\n"
        "from gossamer.bench.cli.app import run\n"
        "for words in sys.argv[1:]:\n"
        "    sys.argv = ['gossamer', *words.split()]\n"
        "    assert run() == 0, words\n"
        "    assert 'torch' not in sys.modules, words\n"
    )
    command = [sys.executable, "-c", script, *LIGHT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "wiki-topics" in done.stdout
    assert all(name in done.stdout for name in presets())


@pytest.mark.parametrize("command", app.COMMANDS, ids=lambda command: command.name)
def test_the_list_of_commands_says_what_they_say_of_themselves(command: app.LazyCommand) -> None:
    assert command.help
    assert " ".join(command.load().help.split()).startswith(command.help)


def test_what_is_listed_without_torch_is_what_there_is() -> None:
    written = json.loads(list_cache.FILE.read_text())
    renew = "write it anew: python -m gossamer.bench.cli.list_cache"
    assert written["recipes"] == list_cache._presets(), renew
    house = [row for row in list_cache._workloads() if "origin" not in row]
    assert written["workloads"] == house, renew


def test_a_list_that_does_not_know_a_preset_is_not_believed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(list_cache, "HOMES", {"recipes": "imported_by_nobody"})
    stored = json.loads(list_cache.FILE.read_text())["recipes"]
    assert list_cache.presets() == [{**row, **list_cache.to_the_end(row["name"])} for row in stored]
    outdated = tmp_path / "list_cache.json"
    outdated.write_text('{"recipes": [{"name": "allreduce"}], "workloads": []}')
    monkeypatch.setattr(list_cache, "FILE", outdated)
    assert [row["name"] for row in list_cache.presets()] == [*presets()]


def test_workloads_say_what_they_are(say: Say) -> None:
    code, out, _ = say("workloads", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert {*workloads.names()} <= rows.keys()
    assert rows["lm"]["parameters"] == 5_797_888
    assert rows["lm"]["metric"] == "held-out loss (nats/token)"
    assert "wiki-topics" in say("workloads")[1]
    assert say("workloads", "lm")[0] == 2


@pytest.mark.parametrize("between", [("--",), ()])
def test_what_follows_the_command_of_a_lab_is_the_commands(
    say: Say, monkeypatch: pytest.MonkeyPatch, between: tuple[str, ...]
) -> None:
    asked = list[tuple[int, list[str]]]()

    def run_lab(hosts: int, rate: str, command: list[str], **more: object) -> LabResult:
        asked.append((hosts, command))
        return LabResult(0, None, False, 1.0, ())

    monkeypatch.setattr("gossamer.bench.cli.lab.run_lab", run_lab)
    command = ["python", "train.py", "--hosts", "8", "--timeout", "60", "-h", "--help"]
    assert say("lab", "--hosts", "2", *between, *command)[0] == 0
    assert asked == [(2, command)]
