"""Whole runs as a user starts them: real ranks, a lab where one can be made, and what lies in the folder afterwards."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tests.bench.cli.conftest import Shell
from tests.marked import SLACK, wait_for

from gossamer.bench.cli.summary import summary
from gossamer.bench.compare import ComparePlan, launch
from gossamer.bench.compare.events import RankEvent
from gossamer.bench.compare.launch import UNFINISHED
from gossamer.bench.record import Record

RIDGE = ("--workload", "ridge", "--hosts", "2")
FOREVER = (*RIDGE, "--steps", "1000000")
# Quick tests of a lab's end are those of tests/lab, and of ranks in it that are killed or frozen.
IN_LAB = pytest.param(("--rate", "100mbit"), marks=[pytest.mark.lab, pytest.mark.slow], id="lab")

WIDE = """
from typing import ClassVar, final
import torch
from torch import nn
from gossamer.bench.workloads import Batch, Data, Workload, workload

@final
@workload("wide")
class Wide(Workload):
    summary: ClassVar[str] = "half a megabyte of parameters, and little to compute"
    metric: ClassVar[str] = "held-out loss"
    lower_is_better: ClassVar[bool] = True
    group: ClassVar[str] = "label"
    batch_size: int = 32

    def load(self):
        x = torch.randn(192, 128, generator=torch.Generator().manual_seed(self.seed))
        return Data((x[:128],), (x[128:],), torch.zeros(128))

    def network(self):
        return nn.Linear(128, 1024)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model, batch):
        return (model(batch[0]) - 1).square().mean()

    def evaluate(self, model):
        with torch.no_grad():
            return float(self.loss(model, self.data.held))
"""

VICTIM_IN_LAB = pytest.param(("--rate", "100mbit"), 1, marks=pytest.mark.lab, id="lab")


def record_in(folder: Path) -> Record:
    """The record, which must be valid JSON, beside a report and nothing half-written."""
    json.loads((folder / "record.json").read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert not list(folder.rglob("*.part"))
    return Record.read(folder / "record.json")


@pytest.mark.gang
def test_compare_in_a_pipe_prints_plain_lines_and_a_table_and_leaves_record_and_report(shell: Shell) -> None:
    (shell.folder / "mine.toml").write_text('exchange = "scatter(qsgd(bits=4))"\nschedule = "slowmo(4)"\n')
    failing = "backup(backups=2)"  # one cannot know in advance that two ranks are too few
    words = ("compare", "ddp", "terngrad", failing, "mine.toml", *RIDGE, "--steps", "10", "--out", "runs/a")
    busy = socket.create_server(("127.0.0.1", 0))  # a port that somebody else's variable names must not matter
    shell.environment |= {"MASTER_PORT": str(busy.getsockname()[1])}
    code, out, err = shell.run(*words)
    busy.close()
    assert code == 1  # one contender cannot be attached; the others are done all the same
    assert "\x1b" not in out + err
    assert "Traceback" not in out + err
    told = r"held out \d\.\d{4}  loss [\d.]+  sent [\d.]+ k?B  a step [\d.]+ m?s  "
    assert re.search(
        rf"^ +ddp  step +5/10 +[\d.]+ m?s  {told}left [\d.]+ m?s$", err, re.M
    )  # it does not say how it waits
    assert re.search(rf"^ +terngrad  step +10/10 +[\d.]+ m?s  {told}waits [\d.]+ m?s$", err, re.M)
    assert f"{failing}: rank 0: " in err
    rows = [line.split() for line in out.splitlines()]
    assert {r[0] for r in rows if r} > {"ddp", "terngrad", "mine"}
    assert next(r for r in rows if r and r[0] == "ddp")[3] == "1.00"  # the time before it is two words
    assert any(f"report: {Path('runs/a/report.html')}" in line for line in out.splitlines())
    record = record_in(shell.folder / "runs" / "a")
    assert [(r.name, r.status) for r in record.runs] == [
        ("ddp", "ok"),
        ("terngrad", "ok"),
        (failing, "failed"),
        ("mine", "ok"),
    ]
    assert (record.baseline, len(record.run("ddp").steps), record.hosts, record.rate) == ("ddp", 10, 2, "unshaped")  # type: ignore[union-attr]
    assert record.command.startswith("gossamer compare ddp terngrad 'backup(backups=2)' mine.toml")
    assert record.run("mine").recipe == "scatter(qsgd()) + slowmo(4)"  # type: ignore[union-attr]
    assert [r.yardstick for r in record.runs] == [True, False, False, False]
    assert record.parameters == 32
    assert record.runs[0].steps[0].wait is None
    assert record.runs[1].steps[0].wait is not None
    shell.expect_nothing()


@pytest.mark.lab
def test_a_resumed_run_in_a_lab_says_json_and_goes_on_with_its_record(shell: Shell) -> None:
    common = ("train", "qsgd", *RIDGE, "--rate", "50mbit,100mbit", "--checkpoint-every", "5", "--out", "half")
    code, out, err = shell.run(*common, "--steps", "5", "--quiet")
    assert (code, out, err) == (0, "", "")
    first = record_in(shell.folder / "half").runs[0]
    code, out, err = shell.run(*common, "--steps", "10", "--resume", "--json")
    assert code == 0, err
    events = [json.loads(line) for line in out.splitlines()]  # every line is JSON, and nothing else is said
    assert [e["step"] for e in events if e["event"] == "step"] == [6, 7, 8, 9, 10]
    assert events[-1] == {"event": "written", "code": 0, "record": "half/record.json", "report": "half/report.html"}
    record = record_in(shell.folder / "half")
    run = record.runs[0]
    assert run.steps[:5] == first.steps
    assert [s.step for s in run.steps] == list(range(1, 11))
    assert [e.step for e in run.evaluations] == [0, 5, 10]
    assert run.wire_bytes == 2 * first.wire_bytes
    assert run.nic_bytes is not None
    assert first.nic_bytes is not None
    assert run.nic_bytes > 1.5 * first.nic_bytes
    assert record.rate == "50mbit,100mbit"
    clock = [s.seconds for s in run.steps]
    assert clock == sorted(clock)
    shell.expect_nothing()


@pytest.mark.gang
def test_torchruns_ranks_take_part_and_rank_0_keeps_the_record(shell: Shell) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "gossamer.bench.cli", "train", "terngrad", "--workload", "ridge", "--steps", "10", "--out", "joined"]
    done = subprocess.run(
        [*torchrun, *words], cwd=shell.folder, env=shell.environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report: joined/report.html") == 1
    assert "@gossamer" not in done.stdout
    record = record_in(shell.folder / "joined")
    assert (record.hosts, len(record.runs[0].steps), record.runs[0].status) == (2, 10, "ok")
    kept = sorted(p.name for p in (shell.folder / "joined" / "checkpoint").iterdir())
    assert kept == ["step10-rank0.pt", "step10-rank1.pt"]


@pytest.mark.gang
def test_a_rank_whose_launcher_is_not_there_says_so(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(busy.getsockname()[1])}
        code, _, err = shell.run("train", "terngrad", "--workload", "ridge", env={**shell.environment, **place})
    assert code == 1
    assert "the ranks cannot find each other" in err
    assert "in use" in err.lower()
    assert "Traceback" not in err


@pytest.mark.gang
@pytest.mark.parametrize("network", [pytest.param((), id="local"), IN_LAB])
def test_sigterm_ends_all_ranks_within_seconds_and_leaves_a_valid_report(
    shell: Shell, network: tuple[str, ...]
) -> None:
    torn = (
        shell.folder / "x" / "checkpoint" / ".gossamer-step999999-rank1-0123abcd.part"
    )  # as of a rank that ends while it writes
    torn.parent.mkdir(parents=True)
    torn.write_bytes(b"half")
    process = shell.start("train", "terngrad", *FOREVER, *network, "--out", "x", "--json")
    shell.await_steps(process)
    assert len(shell.ranks()) == 2
    if not network:
        shell.expect_to_be_closed(process)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGTERM)
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)  # an impatient user changes nothing
    out, err = process.communicate(timeout=300)
    assert process.returncode == 143, err
    assert time.monotonic() - began < 10 + SLACK
    shell.expect_nothing()
    assert "Traceback" not in out + err
    record = record_in(shell.folder / "x")
    run = record.runs[0]
    assert (run.status, run.error) == ("interrupted", "interrupted by SIGTERM")
    assert run.steps
    assert (
        f"This is what was seen until then: terngrad came to step {run.steps[-1].step}."
        in (shell.folder / "x" / "report.html").read_text()
    )


@pytest.mark.gang
def test_on_a_terminal_rows_live_and_ctrl_c_is_heard(shell: Shell) -> None:
    ours, theirs = pty.openpty()
    # `setsid` and a controlling terminal: then the byte of ctrl-C becomes SIGINT for the foreground group.
    wrapper = "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    command = [
        sys.executable,
        "-c",
        wrapper,
        sys.executable,
        "-m",
        "gossamer.bench.cli",
        "train",
        "bf16",
        *FOREVER,
        "--out",
        "x",
    ]
    environment = {**shell.environment, "TERM": "xterm-256color", "COLUMNS": "110", "LINES": "40"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=shell.folder, env=environment)
    os.close(theirs)
    seen = read_until(ours, r"\d+/1000000.*trains")
    for head in ("loss", "held out", "sent", "a step", "waits", "left"):
        assert head in seen
    os.write(ours, b"\x03")
    rest = read_until(ours, r"report: x/report.html")
    assert process.wait(timeout=300) == 130
    os.close(ours)
    assert "\x1b[?25h" in rest  # the cursor is back
    assert "cut off" in rest
    assert "bf16: interrupted by SIGINT" in rest
    assert record_in(shell.folder / "x").runs[0].status == "interrupted"
    shell.expect_nothing()


def read_until(terminal: int, pattern: str) -> str:
    text = ""

    def more() -> Any:
        nonlocal text
        try:
            text += os.read(terminal, 65536).decode(errors="replace")
        except OSError:  # the other side is gone
            pytest.fail(text[-2000:])
        return re.search(pattern, text, re.S)

    wait_for(more, what=lambda: text[-2000:])
    return text


@pytest.mark.gang
@pytest.mark.parametrize(("network", "victim"), [((), 0), VICTIM_IN_LAB])
def test_when_a_rank_is_killed_the_others_end_and_the_report_says_which(
    shell: Shell, network: tuple[str, ...], victim: int
) -> None:
    process = shell.start("train", "terngrad", *FOREVER, *network, "--deadline", "20", "--out", "x", "--json")
    shell.await_steps(process)
    began = time.monotonic()
    os.kill(shell.rank(victim), signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    assert time.monotonic() - began < 20 + SLACK
    shell.expect_nothing()
    run = record_in(shell.folder / "x").runs[0]
    assert run.status == "failed"
    assert f"rank {victim} was killed by SIGKILL" in run.error
    assert f"rank {victim} was killed by SIGKILL" in (shell.folder / "x" / "report.html").read_text()
    assert run.steps
    assert any(f"rank {victim} was killed" in json.loads(line).get("text", "") for line in out.splitlines())


@pytest.mark.gang
@pytest.mark.parametrize("network", [pytest.param((), id="local"), IN_LAB])
def test_a_command_that_is_killed_has_kept_its_record_and_leaves_nothing_else(
    shell: Shell, say: Callable[..., tuple[int, str, str]], network: tuple[str, ...]
) -> None:
    temporary = shell.folder / "tmp"
    temporary.mkdir()
    shell.environment |= {"TMPDIR": str(temporary)}
    process = shell.start("train", "terngrad", *FOREVER, *network, "--out", "x", "--json")
    shell.await_steps(process)
    reader = Thread(target=process.communicate)  # or the pipe would fill, and the command wait
    reader.start()
    record = shell.folder / "x" / "record.json"
    wait_for(record.exists)
    first = len(Record.read(record).runs[0].steps)
    wait_for(lambda: len(Record.read(record).runs[0].steps) > first)
    process.kill()
    reader.join()
    shell.expect_nothing()
    run = Record.read(record).runs[0]
    assert (run.status, run.error) == ("interrupted", UNFINISHED)
    assert [s.step for s in run.steps] == list(range(1, len(run.steps) + 1))
    assert {path.name.split("_")[0] for path in temporary.iterdir()} <= {"torchinductor"}
    code, out, err = say("report", "x", "--markdown")
    assert (code, err) == (0, "")
    assert f"interrupted after {len(run.steps)} step" in out


@pytest.mark.gang
def test_without_a_lab_it_runs_unshaped_and_says_what_that_means(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    module = sys.modules["gossamer.bench.compare.launch"]  # the package shows the function of that name
    monkeypatch.setattr(module, "available", lambda: "no privilege; run as root")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    events: list[RankEvent] = []
    plan = ComparePlan({"x": "bf16"}, workload="ridge", steps=2, chunk=2)
    record, code = launch(plan, 2, "200mbit", "a command", events.append)
    assert code == 0
    assert (record.rate, record.note) == ("unshaped", "unshaped: no privilege; run as root")
    assert "as fast as this machine" in events[0].what.text
    assert record.runs[0].nic_bytes is None
    summary(record)
    out = capsys.readouterr().out
    assert "ridge, 2 ranks, not shaped" in out
    assert "no privilege; run as root" in out


@pytest.mark.lab
def test_bench_steps_measures_yardsticks_and_recipes_and_draws_a_plot(shell: Shell) -> None:
    (shell.folder / "wide.py").write_text(WIDE)
    words = ("bench", "steps", "terngrad", "sgp", "--import", "wide.py", "--workload", "wide", "--rates", "300mbit")
    code, out, err = shell.run(
        *words, "--hosts", "2", "--turns", "1", "--chunk", "4", "--out", "b", "--json", "--slow", "1:30"
    )
    assert code == 0, err
    rows = {r["recipe"]: r for r in json.loads(out)}
    assert {"compute", "ddp", "ddp-fp16", "ddp-powersgd", "ddp-postlocal", "terngrad", "sgp"} <= rows.keys()
    keys = [
        "recipe",
        "rate",
        "hosts",
        "step_ms",
        "low_ms",
        "high_ms",
        "ratio_to_ddp",
        "ratio_to_compute",
        "sent_mb",
        "nic_mb",
        "loss",
    ]
    for row in rows.values():
        assert set(keys) <= row.keys()
        assert (row["rate"], row["hosts"], row["error"]) == ("300mbit", 2, "")
        assert 0 < row["low_ms"] <= row["step_ms"] <= row["high_ms"]
        assert row["loss"] > 0
        assert row["slow"] == "1:30"
        assert row["step_ms"] >= 30
    assert rows["ddp"]["ratio_to_ddp"] == rows["compute"]["ratio_to_compute"] == 1.0
    for name in ("ddp", "ddp-fp16", "ddp-postlocal", "sgp"):
        assert rows[name]["nic_mb"] == pytest.approx(rows[name]["sent_mb"], rel=0.05)
    assert rows["ddp-powersgd"]["sent_mb"] is None
    assert 0 < rows["ddp-powersgd"]["nic_mb"] < rows["ddp"]["nic_mb"]
    assert json.loads((shell.folder / "b" / "steps.json").read_text()) == list(rows.values())
    table = (shell.folder / "b" / "steps.md").read_text()
    assert "| terngrad | 300mbit |" in table
    plot = (shell.folder / "b" / "steps-300mbit.svg").read_text()
    assert plot.startswith("<svg")
    assert all(f">{name}</text>" in plot for name in rows)


def test_steps_are_compared_on_an_emulated_accelerator(shell: Shell) -> None:
    words = (
        "compare",
        "ddp",
        "bf16",
        "--workload",
        "ridge",
        "--hosts",
        "2",
        "--steps",
        "6",
        "--chunk",
        "3",
        "--out",
        "e",
    )
    code, out, err = shell.run(*words, "--timing", "--compute", "20ms")
    assert code == 0, err
    assert "had the shortest mean step" in out
    assert "exposed wait" in out
    for told in (out, err):
        assert "computing was emulated (20ms), so losses mean nothing; a rank used" in " ".join(told.split())
    record = Record.read(shell.folder / "e" / "record.json")
    assert (record.compute, record.timing, record.target()) == ("20ms", True, None)
    for run in record.runs:
        assert run.done == 6
        assert (run.steps[-1].seconds - run.steps[0].seconds) / 5 >= 0.02  # it may be late, and is never early
    page = (shell.folder / "e" / "report.html").read_text()
    assert "losses mean nothing" in page
    assert "Training loss over time" not in page


@pytest.mark.lab
def test_a_lab_prefixes_output_counts_bytes_and_ends_with_the_commands_code(shell: Shell) -> None:
    code, out, err = shell.run("lab", "--hosts", "2", "--", "sh", "-c", "echo I am $RANK of $WORLD_SIZE; exit 7")
    assert (code, sorted(out.splitlines())) == (7, ["[0] I am 0 of 2", "[1] I am 1 of 2"])
    assert re.search(r"host 1: 0\.00 MB sent", err)
