"""Output that nobody reads, that does not fit, or that a terminal has no letters for."""

import fcntl
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from tests.bench.cli.conftest import COMMAND, Shell

from gossamer.bench.cli.console import NARROW, columns, console, is_lively, is_watched, print_table
from gossamer.bench.cli.run_output import RunOutput
from gossamer.bench.record import Record, Run


def test_a_reader_that_leaves_early_is_no_error_of_ours(shell: Shell) -> None:
    process = shell.start("recipes", "--json")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (1, "")


def test_closed_output_is_no_error(shell: Shell) -> None:
    closed = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh"]
    done = subprocess.run([*closed, *COMMAND, "recipes", "topk"], env=shell.environment, cwd=shell.folder, timeout=300)
    assert done.returncode == 0
    done = subprocess.run([*closed, *COMMAND, "recipes", "tpk"], env=shell.environment, cwd=shell.folder, timeout=300)
    assert done.returncode == 2


def test_output_to_a_full_disk_is_said_in_one_line(shell: Shell) -> None:
    with Path("/dev/full").open("w") as full:
        code, _, err = shell.run("recipes", stdout=full)
    assert (code, err) == (1, "gossamer: the output cannot be written: No space left on device\n")


@pytest.mark.lab
def test_letters_that_a_terminal_does_not_know_end_nothing(shell: Shell) -> None:
    shell.environment |= {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    code, out, err = shell.run("lab", "--hosts", "1", "--", "printf", "gr\\303\\274n\n")
    assert (code, out) == (0, "[0] gr\\xfcn\n"), err


def test_every_recipe_can_be_read_in_ascii(shell: Shell) -> None:
    shell.environment |= {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code, out, err = shell.run("recipes")
    assert (code, err, out.isascii()) == (0, "", True)


def test_a_missing_cache_is_told_in_one_line(shell: Shell) -> None:
    (shell.folder / "file").touch()
    shell.environment |= {"GOSSAMER_CACHE": str(shell.folder / "file")}
    code, _, err = shell.run("train", "terngrad", "--workload", "digits", "--steps", "1")
    assert code == 1
    assert err == (
        f"gossamer: the cache folder {shell.folder / 'file'} cannot be made: File exists. "
        "Set GOSSAMER_CACHE to a folder that can be written.\n"
    )


@pytest.mark.parametrize(("columns", "width", "lively"), [("40", NARROW, False), ("100", 100, True)])
def test_tables_keep_their_letters_where_lines_fold_and_rows_are_redrawn_where_they_do_not(
    monkeypatch: pytest.MonkeyPatch, columns: str, width: int, lively: bool
) -> None:
    for name, value in {"COLUMNS": columns, "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert (console().width, is_lively()) == (width, lively)


def test_rows_are_not_redrawn_where_the_cursor_cannot_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"COLUMNS": "100", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert not is_lively()


def test_a_log_that_is_called_a_terminal_for_its_colours_is_not_filled_with_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"COLUMNS": "100", "TERM": "xterm", "FORCE_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    assert console().is_terminal
    assert (is_watched(console()), is_lively()) == (False, False)


def test_a_pipe_folds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert console().width > 500
    assert not is_lively()


def test_commands_that_start_in_one_second_share_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outputs = [RunOutput("compare", None, False, False, False) for _ in range(2)]
    for output in outputs:
        output.folder = Path("runs") / "compare-20261127-080000"
        output.prepare()
    assert [str(output.record) for output in outputs] == [
        "runs/compare-20261127-080000/record.json",
        "runs/compare-20261127-080000-2/record.json",
    ]
    assert outputs[1].checkpoint == str(tmp_path.resolve() / "runs" / "compare-20261127-080000-2" / "checkpoint")


@pytest.mark.parametrize(
    "words",
    [
        "train bf16 --workload ridge",
        "compare ddp --workload ridge",
        "tune qsgd --workload ridge --trials 1 --repeats 1 --steps 6 --hosts 2",
        "bench steps --workload ridge --rates unshaped",
    ],
)
def test_two_commands_do_not_write_to_one_folder_at_once(
    say: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("gossamer.bench.cli.compare.launch", lambda *args: (ended(), 0))
    monkeypatch.setattr("gossamer.bench.cli.bench.measure_steps", lambda *args: [])
    (tmp_path / "x").mkdir()
    other = os.open(tmp_path / "x", os.O_RDONLY)  # locks of one process are apart, too, if it has opened a file twice
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        code, out, err = say(*words.split(), "--out", "x")
    finally:
        os.close(other)
    assert (code, out) == (2, "")
    assert "another command writes to x: wait until it has ended, or give another folder with --out" in err
    assert not list((tmp_path / "x").iterdir())
    assert say(*words.split(), "--out", "x")[0] == 0
    assert say(*words.split(), "--out", "x", "--force")[0] == 0  # the one before has ended


def ended() -> Record:
    """The record of a run that nobody made."""
    return Record("", "", "ridge", "", "loss", True, 1, 2, "unshaped", 0, runs=[Run("ddp", "ddp")])


@pytest.mark.parametrize("width", [20, 40, 60, 90])
def test_no_table_loses_a_number_to_a_narrow_terminal(width: int) -> None:
    paper = Console(width=width, file=io.StringIO())
    made = columns("recipe", "a step", "steps an hour", "loss")
    made.add_row("scatter(qsgd()) + local_sgd(8)", "362 ms", "2,477", "2.325 to 0.086")
    print_table(paper, made)
    assert isinstance(paper.file, io.StringIO)
    text = paper.file.getvalue()
    assert re.search(r"362 ms +2,477 +2\.325 to 0\.086", text), text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
