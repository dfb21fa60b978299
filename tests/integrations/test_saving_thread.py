"""Checkpoints that a thread writes: they hold the moment of the call, their errors are raised on all ranks, nothing hangs."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.gang import Call, Gang, at_once
from tests.integrations.loops import attached, flat, same, small_step
from tests.integrations.test_frozen import process_of
from tests.marked import SLACK
from torch import Tensor

import gossamer
from gossamer.checkpoints.folder import Folder
from gossamer.core.errors import CheckpointError, PeerError

pytestmark = pytest.mark.gang

save, load = gossamer.checkpoint.save, gossamer.checkpoint.load
DEADLINE = 3.0
RECIPES = ["topk(ratio=0.1)", "local_sgd(4)", "sgp"]


def hold_up(seconds: float) -> tuple[threading.Event, Callable[[], None]]:
    """Writing begins once the event is set, and takes so long from now on; the returned function ends that."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    write_data, may_write = FileSystemWriter.write_data, threading.Event()

    def slow(self: Any, *args: Any) -> Any:
        may_write.wait(60.0)
        time.sleep(seconds)
        return write_data(self, *args)

    FileSystemWriter.write_data = slow  # type: ignore[method-assign]
    return may_write, lambda: setattr(FileSystemWriter, "write_data", write_data)


def saved_meanwhile(rank: int, size: int, recipe: str, path: str) -> tuple[list[Tensor], list[Tensor], bool, bool]:
    """Three steps that are made while a checkpoint is written, and again from that checkpoint."""
    may_write, give_back = hold_up(0.0)
    with attached(recipe) as (model, optimizer, comm):
        while comm.step < 3:
            small_step(model, optimizer, comm, rank)
        saving = save(comm, path, {"epoch": 3}, wait=False)
        went_on, whole = not saving.done(), list[Tensor]()
        while comm.step < 6:
            small_step(model, optimizer, comm, rank)
            whole.append(flat(model))
        may_write.set()
        saving.wait()
        done = saving.done()
    give_back()
    again = list[Tensor]()
    with attached(recipe, seed=99) as (model, optimizer, comm):
        assert load(comm, path) == {"epoch": 3}
        while comm.step < 6:
            small_step(model, optimizer, comm, rank)
            again.append(flat(model))
    return whole, again, went_on, done


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_holds_the_moment_of_the_call_while_training_goes_on(gang2: Gang, recipe: str, tmp_path: Path) -> None:
    for whole, again, went_on, done in gang2.run(saved_meanwhile, recipe, str(tmp_path / "one")):
        assert went_on
        assert done
        assert len(whole) == len(again) == 3
        assert all(map(same, whole, again))


def waited_for(rank: int, size: int, path: str) -> list[bool]:
    """Whether a checkpoint was complete when the next save, a load, finish() and detach() had returned."""
    may_write, give_back = hold_up(0.3)
    complete = list[bool]()

    def look(name: str) -> None:
        complete.append((Path(path) / name / ".metadata").exists())

    with attached("topk") as (model, optimizer, comm):
        small_step(model, optimizer, comm, rank)
        save(comm, f"{path}/a", wait=False)
        look("a")
        may_write.set()
        second = save(comm, f"{path}/b", wait=False)
        look("a")
        load(comm, f"{path}/b")
        look("b")
        assert second.done()
        save(comm, f"{path}/c", wait=False)
        comm.finish()
        look("c")
    with attached("topk") as (model, optimizer, comm):
        save(comm, f"{path}/d", wait=False)
        comm.detach()
        look("d")
    with attached("topk") as (model, optimizer, comm):
        save(comm, f"{path}/e", wait=False)
    look("e")
    give_back()
    return complete


def test_whatever_needs_it_waits_for_it(gang2: Gang, tmp_path: Path) -> None:
    for first, *later in gang2.run(waited_for, str(tmp_path)):
        assert not first
        assert later == [True] * 5


def stumbling(rank: int, size: int, path: str) -> dict[str, str]:
    """One rank's disk is full: what each rank is told, and where."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    write_data, said = FileSystemWriter.write_data, dict[str, str]()

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    def tried(name: str, do: Callable[[], Any]) -> None:
        try:
            do()
        except CheckpointError as error:
            said[name] = str(error)

    def begun(comm: Any, name: str) -> Any:
        FileSystemWriter.write_data = full if rank == 1 else write_data  # type: ignore[method-assign]
        saving = save(comm, f"{path}/{name}", wait=False)
        while not saving.done():
            time.sleep(0.01)
        FileSystemWriter.write_data = write_data  # type: ignore[method-assign]
        return saving

    with attached("topk") as (model, optimizer, comm):
        small_step(model, optimizer, comm, rank)
        begun(comm, "a")
        tried("the next save", lambda: save(comm, f"{path}/b"))
        tried("told once", lambda: save(comm, f"{path}/c"))
        saving = begun(comm, "d")
        tried("wait", saving.wait)
        tried("after wait", lambda: save(comm, f"{path}/e", wait=False).wait())
        small_step(model, optimizer, comm, rank)
        begun(comm, "f")
        tried("finish", comm.finish)
    with attached("topk") as (model, optimizer, comm):
        begun(comm, "g")
        tried("detach", comm.detach)
        small_step(model, optimizer, comm, rank)  # without gossamer

    def leaves() -> None:
        with attached("topk") as (_, _, comm):
            begun(comm, "h")

    tried("the end of the block", leaves)

    def fails() -> None:
        with attached("topk") as (_, _, comm):
            begun(comm, "i")
            raise ValueError("the loop's own")

    with pytest.raises(ValueError, match="own") as noted:
        fails()
    said["a note"] = noted.value.__notes__[0]
    return said


def test_what_fails_on_one_rank_is_raised_on_all_where_they_meet_next(gang2: Gang, tmp_path: Path) -> None:
    places = {
        "the next save": "a",
        "wait": "d",
        "finish": "f",
        "detach": "g",
        "the end of the block": "h",
        "a note": "i",
    }
    for said in gang2.run(stumbling, str(tmp_path)):
        assert said.keys() == places.keys()
        for place, name in places.items():
            why = f"rank 1 cannot write to {tmp_path}/{name}: [Errno 28] No space left on device"
            assert why in said[place], place
            assert "no checkpoint was saved" in said[place]
    assert sorted(p.parent.name for p in tmp_path.glob("*/.metadata")) == ["c", "e"]


def struck(rank: int, size: int, path: str, victim: int, blow: signal.Signals, notices: str) -> tuple[str, float, str]:
    """The victim is hit in its thread that writes; the others are told where they wait for the checkpoint."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    doomed = process_of(victim, size)

    def hit(*_: Any) -> Any:
        os.kill(os.getpid(), blow)

    comm: Any
    with suppress(PeerError), attached("slowmo(3)", deadline=DEADLINE) as (model, optimizer, comm):
        while comm.step < 4:
            small_step(model, optimizer, comm, rank)
        if rank == victim:
            FileSystemWriter.write_data = hit  # type: ignore[method-assign]
        saving = save(comm, path, wait=False)
        if rank == victim:
            time.sleep(60)
        began = time.monotonic()
        with pytest.raises(PeerError) as told:
            saving.wait() if notices == "wait" else comm.detach()
        waited = time.monotonic() - began
        with suppress(ProcessLookupError):
            os.kill(doomed, signal.SIGKILL)
    with pytest.raises(CheckpointError) as refused:
        Folder(path)
    return str(told.value), waited, str(refused.value)


BLOWS = [(1, signal.SIGKILL, "wait"), (1, signal.SIGSTOP, "detach"), (0, signal.SIGKILL, "detach")]


def test_a_rank_that_is_lost_meanwhile_is_named_within_the_deadline(tmp_path: Path) -> None:
    calls = {case: Call(struck, (str(tmp_path / f"{case[0]}{case[1].name}"), *case), (case[0],)) for case in BLOWS}
    with at_once(3, calls) as outcome_of:
        for case in BLOWS:
            victim = case[0]
            for rank, outcome in enumerate(outcome_of(case)):
                if rank == victim:
                    continue
                text, waited, refused = outcome
                assert f"rank {rank} of 3: step 4, 'checkpoint.save'" in text
                assert (f"No answer from rank {victim}:" if victim else "The store does not answer") in text
                assert "load the checkpoint before it" in text
                assert waited < DEADLINE + 2.0 + SLACK
                assert "not a finished distributed checkpoint" in refused


def test_one_process_alone_saves_so_too(tmp_path: Path) -> None:
    with attached("topk") as (model, optimizer, comm):
        small_step(model, optimizer, comm, 0)
        before = flat(model)
        save(comm, tmp_path, wait=False)
        small_step(model, optimizer, comm, 0)
        load(comm, tmp_path)
        assert comm.step == 1
        assert same(flat(model), before)
