"""Run events: what a process writes of itself, and that a killed one loses no more than its last second."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import gossamer
from gossamer.core.errors import AttachError
from gossamer.costs.goodput import goodput_of
from gossamer.integrations import run_events

ROOT = Path(__file__).parents[2]


def lines(folder: Path) -> list[dict[str, Any]]:
    (path,) = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for line in path.read_text().splitlines()]


def named(folder: Path, event: str) -> list[dict[str, Any]]:
    return [line for line in lines(folder) if line["event"] == event]


def begun(folder: Path, recipe: str = "allreduce", **options: Any) -> Any:
    model = nn.Linear(2, 1)
    return gossamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe, events=folder, **options)


def step(comm: Any) -> None:
    comm.optimizers[0].zero_grad()
    comm.model(torch.ones(1, 2)).sum().backward()
    comm.optimizers[0].step()


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_events, "OFTEN", 0.02)
    monkeypatch.setattr(run_events, "RARELY", 2)


def until(true: Callable[[], object], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_nothing_is_written_unless_a_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 1)
    with gossamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "allreduce") as comm:
        step(comm)
        assert "goodput" not in comm.metrics()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("often")
def test_a_process_says_what_it_does(tmp_path: Path) -> None:
    with begun(tmp_path / "run") as comm:
        step(comm)
        until(lambda: named(tmp_path / "run", "first step"))  # or it might be written at any of the next ones
        step(comm)
        comm.log(held_out=torch.tensor(2.5), loss=1.0)
        until(lambda: named(tmp_path / "run", "steps"))
        gossamer.checkpoint.save(comm, tmp_path / "saved")
        step(comm)
    said = lines(tmp_path / "run")
    assert [line["event"] for line in said if line["event"] != "alive"] == [
        *("began", "attached", "first step", "steps", "held out", "saved", "steps", "ended")
    ]
    assert [line["at"] for line in said] == sorted(line["at"] for line in said)
    assert said[0]["rank"] == 0
    assert (said[1]["recipe"], said[1]["step"]) == ("allreduce(fp32())", 0)
    assert [(s["step"], s["done"]) for s in named(tmp_path / "run", "steps")] == [(2, 2), (3, 3)]
    assert [(q["step"], q["value"]) for q in named(tmp_path / "run", "held out")] == [(2, 2.5)]
    (saved,) = named(tmp_path / "run", "saved")
    assert (saved["step"], saved["path"]) == (2, str(tmp_path / "saved"))
    assert said[-1]["how"] == "in order"
    run = goodput_of(tmp_path / "run")
    assert run.last == 3
    assert run.spent.counted == 3


@pytest.mark.gang
def test_the_first_time_of_a_process_counts_from_its_start_and_later_ones_from_attach(tmp_path: Path) -> None:
    """A new process, since others of these tests have begun here before."""
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); time.sleep(0.3)\n"
        "from tests.integrations.test_run_events import begun, step\n"
        "for folder in sys.argv[2:]:\n"
        "    with begun(folder) as comm: step(comm)\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, ROOT, tmp_path / "a", tmp_path / "b"], check=True, env=_environment()
    )
    first, second = (named(tmp_path / name, "attached")[0]["at"] for name in "ab")
    assert first > 0.3
    assert second < first


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


KILLED = """
import sys, time
from tests.integrations.test_run_events import begun, step
with begun(sys.argv[1]) as comm:
    while True:
        time.sleep(0.02)
        step(comm)
        print(comm.step, flush=True)
"""


@pytest.mark.gang
def test_a_killed_process_loses_at_most_its_last_second(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path], env=_environment(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    while int(process.stdout.readline()) < 20:  # the first ones load much
        pass
    done = [(time.monotonic(), int(process.stdout.readline()))]
    while done[-1][0] - done[0][0] < 3.5:
        done.append((time.monotonic(), int(process.stdout.readline())))
    process.send_signal(signal.SIGKILL)
    end = time.monotonic()
    unread, _ = process.communicate()
    run = goodput_of(tmp_path)
    assert run.cut == []
    before = [number for at, number in done if at < end - 2.0]  # a busy machine may let the thread that writes wait
    most = int((unread.split() or [done[-1][1]])[-1])
    assert before[-1] <= run.last <= most + 1  # the last step may be written and not printed
    assert run.ranks[0].processes[0].events.ended is None


@pytest.mark.gang
def test_who_never_detaches_ends_with_its_program(tmp_path: Path) -> None:
    """Both are forked from one process that has loaded torch, which takes seconds."""
    program = (
        "import os, sys\n"
        "from tests.integrations.test_run_events import begun, step\n"
        "name = next((each for each in ('ends', 'fails') if not os.fork()), None)\n"
        "if name is None:\n"
        "    os.wait(), os.wait()\n"
        "else:\n"
        "    comm = begun(f'{sys.argv[1]}/{name}')\n"
        "    step(comm)\n"
        "    assert name != 'fails'\n"
    )
    command = [sys.executable, "-c", program, tmp_path]
    subprocess.run(command, check=True, env=_environment(), stderr=subprocess.DEVNULL)
    for name, how in (("ends", "in order"), ("fails", "failed: AssertionError")):
        assert lines(tmp_path / name)[-1]["how"] == how


@pytest.mark.usefixtures("often")
def test_a_failure_is_how_a_process_ended(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), begun(tmp_path):
        raise ZeroDivisionError
    assert lines(tmp_path)[-1]["how"] == "failed: ZeroDivisionError"


def test_nothing_stands_behind_how_a_process_ended(tmp_path: Path) -> None:
    """Also where the thread that writes has taken the last line, and the end of the program looks once more."""
    fabric: Any = SimpleNamespace(ledger=SimpleNamespace(exposed_seconds=0.0), standstill=SimpleNamespace(since=None))
    events = run_events.RunEvents(tmp_path, 0, 1, fabric)
    events._over.set()
    events.put("ended", how="in order")
    events._tick()
    events._tick()
    assert lines(tmp_path)[-1]["how"] == "in order"


@pytest.mark.usefixtures("often")
def test_a_checkpoint_that_is_loaded_says_where_steps_go_on(tmp_path: Path) -> None:
    with begun(tmp_path / "one") as comm:
        for _ in range(3):
            step(comm)
        gossamer.checkpoint.save(comm, tmp_path / "saves" / "step3")
    with begun(tmp_path / "two") as comm:
        gossamer.checkpoint.resume(comm, tmp_path / "saves")
        step(comm)
    assert [line["step"] for line in named(tmp_path / "two", "loaded")] == [3]
    assert goodput_of(tmp_path / "two").ranks[0].processes[0].events.first == 3


@pytest.mark.usefixtures("often")
def test_a_notice_is_written(tmp_path: Path) -> None:
    with begun(tmp_path) as comm, comm.leaving_at(seconds=60):
        step(comm)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert comm.stopping
    assert [line["signal"] for line in named(tmp_path, "told to stop")] == [signal.SIGUSR1]
    assert goodput_of(tmp_path).ranks[0].processes[0].events.told is not None


@pytest.mark.usefixtures("often")
def test_a_callback_hears_of_it(tmp_path: Path) -> None:
    told = list[dict[str, float]]()
    with begun(tmp_path, on_metrics=lambda step, metrics: told.append(metrics), metrics_every=1) as comm:
        for _ in range(5):
            step(comm)
            time.sleep(0.03)  # or all of them were written as one
        until(lambda: comm.metrics()["goodput"] > 0)
        step(comm)
    assert 0 < told[-1]["goodput"] < 1
    assert {"starting_seconds", "waiting_seconds", "saving_seconds", "standing_seconds"} <= told[-1].keys()


@pytest.mark.usefixtures("often")
def test_each_start_has_a_file_and_a_number_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        with begun(tmp_path) as comm:
            step(comm)
    assert sorted(path.name[:8] for path in tmp_path.iterdir()) == ["rank0.1.", "rank0.2."]


def test_two_communicators_cannot_share_a_folder(tmp_path: Path) -> None:
    with (
        begun(tmp_path / "run"),
        pytest.raises(AttachError, match="written to by another communicator of this process"),
    ):
        begun(tmp_path / "run" / ".." / "run")
    with begun(tmp_path / "run"):
        pass


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AttachError, match=r"file cannot be written: .*give a folder that this rank may write to"):
        begun(tmp_path / "file")


@pytest.mark.usefixtures("often")
def test_a_disk_that_is_full_ends_the_events_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def full(file: int, text: bytes) -> int:
        if b'"steps"' in text:
            raise OSError(28, "No space left on device")
        return write(file, text)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with begun(tmp_path) as comm:
            monkeypatch.setattr(os, "write", full)
            step(comm)
            step(comm)
            until(lambda: caught)
            step(comm)
            assert comm.step == 3
    (warned,) = caught
    assert "are no longer written to" in str(warned.message)
    assert "No space left on device. Training goes on" in str(warned.message)


def test_a_step_sets_numbers_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_events, "OFTEN", 1000.0)
    with begun(tmp_path) as comm:
        before = lines(tmp_path)
        for _ in range(3):
            step(comm)
        assert lines(tmp_path) == before
    assert goodput_of(tmp_path).last == 3


# -- of several ranks ------------------------------------------------------------------------------------------------------


def trained(rank: int, size: int, folder: str, recipe: str, late: float) -> dict[str, float]:
    run_events.OFTEN, run_events.LONG = 0.02, 0.1
    try:
        with begun(Path(folder), recipe) as comm:
            for number in range(12):
                if rank == 1 and number == 6:
                    time.sleep(late)
                step(comm)
            return comm.metrics()
    finally:
        run_events.OFTEN, run_events.LONG = 1.0, 1.0


@pytest.mark.gang
def test_ranks_share_a_folder_and_who_waits_says_so(gang2: Any, tmp_path: Path) -> None:
    gang2.run(trained, str(tmp_path), "allreduce", 0.6)
    run = goodput_of(tmp_path)
    assert [rank.rank for rank in run.ranks] == [0, 1]
    assert [rank.last for rank in run.ranks] == [12, 12]
    waits = [p.events.waits for p in run.ranks[0].processes]
    assert waits[0], "rank 0 waited for rank 1"
    assert run.ranks[0].processes[0].events.counts[-1].waited > 0.4


def refused(rank: int, size: int, folder: str) -> str:
    with pytest.raises(gossamer.GossamerError) as error:
        begun(Path(folder) / "file" if rank else Path(folder) / "fine")
    return str(error.value)


@pytest.mark.gang
def test_a_refusal_of_one_rank_is_told_to_all(gang2: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = gang2.run(refused, str(tmp_path))
    assert told[0].startswith("rank 1 cannot go on: events=")
    assert "cannot be written" in told[1]


def hooked(rank: int, size: int, folder: str) -> int:
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    hook = gossamer.ddp.register(model, "topk", events=folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    hook.close()
    return hook.step


@pytest.mark.gang
def test_the_hook_of_ddp_writes_events_too(gang2: Any, tmp_path: Path) -> None:
    assert gang2.run(hooked, str(tmp_path)) == [3, 3]
    run = goodput_of(tmp_path)
    assert run.last == 3
    assert [p.events.ended for rank in run.ranks for p in rank.processes] == ["in order", "in order"]
