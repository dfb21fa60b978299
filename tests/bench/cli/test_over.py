"""What commands write over: their own files. Another's stays as it is, and so does what is no file at all."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from gossamer.bench.compare.steps import StepRow
from gossamer.bench.record import Record, Run, Step
from gossamer.bench.report.page import PAGE

Say = Callable[..., tuple[int, str, str]]
PROGRAM = "import gossamer\n\nprint('months of work')\n"
RECORD = Record("gossamer compare", "2026-01-01T00:00:00+00:00", "ridge", "", "loss", True, 32, 2, "unshaped", 0)
RECORD.runs = [Run("ddp", "ddp", steps=[Step(1, 0.1, 2.0, 10)])]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands run: with a record, somebody's program, and no ranks to start."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("gossamer.bench.cli.compare.launch", lambda *args: (RECORD, 0))
    (tmp_path / "run").mkdir()
    RECORD.write(tmp_path / "run" / "record.json")
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


def listing(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


@pytest.mark.parametrize("more", [(), ("--markdown",), ("--force", "--markdown", "--out", "other/x")])
def test_a_strangers_file_stays_unless_forced(say: Say, place: Path, more: tuple[str, ...]) -> None:
    before = listing(place)
    code, out, err = say("report", "run", "--out", "train.py", *more)
    if "--force" in more:
        assert (code, err) == (1, "gossamer: other/x could not be written: No such file or directory\n")
    else:
        assert (code, out) == (2, "")
        assert err == (
            f"gossamer: train.py is there already, and is no report{' in Markdown' * len(more)} that gossamer wrote; "
            "it stays as it is; give another place, or --force\n"
        )
    assert (place / "train.py").read_text() == PROGRAM
    assert listing(place) == before


def test_with_force_it_does_not(say: Say, place: Path) -> None:
    assert say("report", "run", "--out", "train.py", "--force") == (0, "train.py\n", "")
    assert (place / "train.py").read_text().startswith("<!doctype html>")
    assert stat.S_IMODE((place / "train.py").stat().st_mode) & 0o444 == 0o444 & ~current_umask()


def current_umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


def test_a_report_takes_the_place_of_an_earlier_one_but_not_of_the_record(say: Say, place: Path) -> None:
    for words in (("--out", "a.html"), ("--out", "a.md", "--markdown"), ()):
        for _ in range(2):
            assert say("report", "run", *words)[0] == 0
    assert (place / "a.md").read_text().splitlines()[2].startswith("**")
    code, _, err = say("report", "run", "--out", "run/record.json")
    assert (code, "record.json is there already" in err) == (2, True)
    assert Record.read(place / "run" / "record.json") == RECORD


def test_output_that_does_not_fit_is_no_report_that_cannot_be_written(
    say: Say, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a table that is longer than what Python holds back, some is written while the command runs."""

    def full(*told: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gossamer.bench.cli.report.print", full, raising=False)
    with pytest.raises(OSError, match="No space"):  # for which the program has one line, that names the output
        say("report", "run", "--markdown")


def test_a_folder_means_the_report_in_it(say: Say, place: Path) -> None:
    (place / "link").symlink_to("run")
    assert say("report", "run", "--out", ".") == (0, "report.html\n", "")
    assert say("report", "run", "--out", "link") == (0, "link/report.html\n", "")
    assert say("report", "run", "--out", ".", "--markdown") == (0, "report.md\n", "")
    assert (place / "report.md").read_text().startswith("<!-- a report, written by gossamer -->\n\n**")
    (place / "run" / "report.md").mkdir()
    code, _, err = say("report", "run", "--out", "run", "--markdown")
    assert (code, "run/report.md is a folder, and only files are written over" in err) == (2, True)


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_what_is_no_regular_file_stays_even_if_forced(say: Say, place: Path, force: tuple[str, ...]) -> None:
    os.mkfifo(place / "pipe")
    (place / "to-pipe").symlink_to("pipe")
    (place / "nowhere").symlink_to("gone")
    (place / "round").symlink_to("round")
    (place / "to-program").symlink_to("train.py")
    for name, what in {
        "pipe": "is a pipe",
        "/dev/full": "is a device",
        "to-pipe": "is a link to",
        "nowhere": "is a link to",
        "round": "is a link to",
        "to-program": "is a link to",
    }.items():
        code, out, err = say("report", "run", "--out", name, *force)
        assert (code, out, what in err) == (2, "", True), err
    assert stat.S_ISFIFO((place / "pipe").lstat().st_mode)
    assert stat.S_ISCHR(Path("/dev/full").lstat().st_mode)
    assert (place / "to-program").is_symlink()
    assert (place / "train.py").read_text() == PROGRAM
    assert not (place / "gone").exists()


def test_a_link_to_an_earlier_report_is_followed_and_stays(say: Say, place: Path) -> None:
    assert say("report", "run")[0] == 0
    (place / "run" / "report.html").write_text(PAGE.marks[0].decode())
    (place / "latest.html").symlink_to("run/report.html")
    assert say("report", "run", "--out", "latest.html")[0] == 0
    assert (place / "latest.html").is_symlink()
    assert (place / "run" / "report.html").read_text().startswith("<!doctype html>")


def test_figures_are_written_where_no_stranger_is_or_not_at_all(say: Say, place: Path) -> None:
    pytest.importorskip("resvg_py", reason="PNG figures need resvg-py")
    (place / "figures").mkdir()
    (place / "figures" / "loss-time.png").write_text("another's")
    code, _, err = say("report", "run", "--figures", "figures")
    assert (code, "figures/loss-time.png is there already" in err) == (2, True)
    assert listing(place / "figures") == ["loss-time.png"]
    for more in (("--force",), ()):
        assert say("report", "run", "--figures", "figures", *more)[0] == 0
    assert (place / "figures" / "loss-time.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", [("train", "bf16"), ("compare", "ddp", "bf16")])
@pytest.mark.parametrize("name", ["record.json", "report.html"])
def test_a_run_refuses_a_folder_with_a_strangers_files_before_it_begins(
    say: Say, place: Path, command: tuple[str, ...], name: str
) -> None:
    (place / name).write_text('{"mine": 1}')
    words = (*command, "--workload", "ridge", "--out", ".")
    code, out, err = say(*words)
    assert (code, out) == (2, "")
    assert f"{name} is there already" in err
    assert err.endswith("it stays as it is; give another folder with --out, or --force\n")
    assert (place / name).read_text() == '{"mine": 1}'
    for more in ("--force", "--quiet"):
        assert say(*words, more)[0] == 0
    assert Record.read(place / "record.json") == RECORD


def test_a_run_goes_on_in_the_folder_of_an_older_version(say: Say, place: Path) -> None:
    record = place / "run" / "record.json"
    record.write_text(record.read_text().replace('"written by": "gossamer", ', "", 1))
    assert record.read_text().startswith('{"command": "gossamer compare"')
    assert say("compare", "ddp", "--workload", "ridge", "--out", "run")[0] == 0
    assert record.read_text().startswith('{"written by": "gossamer"')


@pytest.mark.parametrize("words", [(), ("--json",), ("--out", "full")])
def test_steps_that_were_measured_are_told_whatever_comes_after(
    say: Say, place: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """An interrupt at the second rate, or a disk that is full after the first."""
    rows = [StepRow("ddp", "unshaped", 4, 10.0, 9.0, 11.0, 1.0, 2.0, 0.1, 0.1, 3.0)]

    def measure(*args: object) -> list[StepRow]:
        if not rows:
            raise KeyboardInterrupt
        return [rows.pop()]

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gossamer.bench.cli.bench.measure_steps", measure)
    monkeypatch.setattr("gossamer.bench.cli.bench._rates", lambda text, hosts: ["unshaped", "1gbit"])
    monkeypatch.setattr("os.replace", full)
    code, out, err = say("bench", "steps", "bf16", "--workload", "ridge", *words)
    assert (code, "No space left" in err) == ((1, True) if "full" in words else (130, False))
    assert ("10.0" if "--json" in words else "10 (9-11)") in out


def test_measured_steps_are_not_written_over_a_strangers_file(
    say: Say, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = StepRow("ddp", "unshaped", 4, 10.0, 9.0, 11.0, 1.0, 2.0, 0.1, 0.1, 3.0)
    monkeypatch.setattr("gossamer.bench.cli.bench.measure_steps", lambda *args: [row])
    words = ("bench", "steps", "bf16", "--workload", "ridge", "--rates", "unshaped", "--out", ".")
    for name in ("steps.json", "steps.md", "steps-unshaped.svg"):
        (place / name).write_text("[1, 2]")
        code, out, err = say(*words)
        assert (code, out, f"{name} is there already" in err) == (2, "", True)
        assert (place / name).read_text() == "[1, 2]"
        for more in (("--force",), ()):
            assert say(*words, *more)[0] == 0
        for written in place.glob("steps*"):
            written.unlink()
