"""Checkpoints: a run that goes on is the run that was never interrupted, and a full disk takes nothing away."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.bench.compare.comparisons import copy, of, run, steps, trial

from gossamer.bench.compare.checkpoints import saved_steps

pytestmark = pytest.mark.gang


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize(
    "recipe", ["terngrad", "topk(ratio=0.1)", "slowmo(every=3)", "osgp", "ddp", "accordion_batch(epoch=2)"]
)
def test_a_resumed_run_is_bit_equal_to_one_that_was_never_interrupted(gang2: Any, tmp_path: Path, recipe: str) -> None:
    plan = {"contenders": {"x": recipe}, "chunk": 3, "checkpoint_every": 6}
    _, whole = run(gang2, **plan, steps=12, checkpoint=str(tmp_path / "whole"))
    run(gang2, **plan, steps=6, checkpoint=str(tmp_path / "half"))
    code, rest = run(gang2, **plan, steps=12, checkpoint=str(tmp_path / "half"), resume=True)
    assert code == 0
    assert of(rest, "contender")[0]["done"] == 6
    told = [(kind, e) for chunk in of(rest, "history") for kind, e in chunk["events"]]
    assert [e["step"] for kind, e in told if kind == "step"] == [1, 2, 3, 4, 5, 6]
    assert [e["step"] for kind, e in told if kind == "evaluation"] == [0, 3]  # the last model is judged again
    assert [e["step"] for e in of(rest, "evaluation")] == [6, 9, 12]
    overlaps = recipe == "osgp"  # then a step's bytes depend on how far its message has come
    expected, found = ([s[: 2 if overlaps else 3] for s in steps(events, "x")] for events in (whole, rest))
    assert found == expected[6:]
    assert of(rest, "evaluation")[-1]["quality"] == of(whole, "evaluation")[-1]["quality"]
    for rank in (0, 1):
        ours, theirs = (torch.load(tmp_path / f / f"step12-rank{rank}.pt")["state"] for f in ("half", "whole"))
        assert all(torch.equal(ours["model"][k], theirs["model"][k]) for k in theirs["model"])
        assert ours["sent"] == theirs["sent"]
        assert ours["seconds"] > 0


def test_only_the_last_checkpoint_stays_and_the_end_is_always_kept(gang2: Any, tmp_path: Path) -> None:
    run(gang2, contenders={"x": "bf16"}, steps=8, chunk=2, checkpoint_every=5, checkpoint=str(tmp_path))
    assert names(tmp_path) == ["step8-rank0.pt", "step8-rank1.pt"]


def resume(gang: Any, folder: Path, **other: Any) -> tuple[int | str, str]:
    code, events = run(
        gang, **{"contenders": {"x": "bf16"}, "steps": 9, "checkpoint": str(folder), "resume": True, **other}
    )
    failed = of(events, "failed")
    return code, failed[0]["error"] if failed else ""


@pytest.fixture(scope="module")
def first_run(gang2: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run(gang2, contenders={"x": "bf16"}, steps=4, checkpoint=str(folder))
    return folder


@pytest.fixture
def four_steps(first_run: Path, tmp_path: Path) -> Path:
    """The checkpoint of a run of four steps, in a folder that a test may change."""
    return copy(first_run, tmp_path / "run")


def test_nothing_to_resume_from_says_who_lacks_it(gang2: Any, four_steps: Path) -> None:
    (four_steps / "step4-rank1.pt").unlink()
    code, error = resume(gang2, four_steps)
    assert code == 1
    assert f"nothing to resume from in {four_steps}: rank(s) 1 have none" in error


def test_another_number_of_ranks_is_said_by_number(gang2: Any, gang4: Any, tmp_path: Path) -> None:
    for before, now in ((gang2, gang4), (gang4, gang2)):
        folder = tmp_path / str(before.size)
        run(before, contenders={"x": "bf16"}, steps=4, checkpoint=str(folder))
        code, error = resume(now, folder)
        assert code == 1
        assert f"had {before.size} ranks, and there are {now.size} now: resume with as many" in error


@pytest.mark.parametrize("recipe", ["qsgd + local_sgd(3)", "scatter(qsgd()) + backup_workers(backups=0)"])
def test_compression_errors_outlive_an_interruption(gang2: Any, tmp_path: Path, recipe: str) -> None:
    """They are measured at step 5, or where its round ends; a continuation from step 6 to 9 measures none."""
    plan = {"contenders": {"x": recipe}, "chunk": 3, "checkpoint_every": 6, "measure_every": 5}
    _, whole = run(gang2, **plan, steps=9, checkpoint=str(tmp_path / "whole"))
    run(gang2, **plan, steps=6, checkpoint=str(tmp_path / "half"))
    _, rest = run(gang2, **plan, steps=9, checkpoint=str(tmp_path / "half"), resume=True)
    assert of(rest, "layers") == of(whole, "layers") != []


@pytest.mark.parametrize("steps_before", [4, 8])
def test_a_continuation_is_judged_where_the_whole_run_would_have_been(
    gang2: Any, tmp_path: Path, steps_before: int
) -> None:
    """Turns of three steps, and rounds of four: a turn goes on to the end of its round."""
    plan = {"contenders": {"x": "local_sgd(4)"}, "chunk": 3, "checkpoint_every": 4}
    _, whole = run(gang2, **plan, steps=24, checkpoint=str(tmp_path / "whole"))
    run(gang2, **plan, steps=steps_before, checkpoint=str(tmp_path / "half"))
    _, rest = run(gang2, **plan, steps=24, checkpoint=str(tmp_path / "half"), resume=True)
    expected = [e["step"] for e in of(whole, "evaluation") if e["step"] >= steps_before]
    assert [e["step"] for e in of(rest, "evaluation")] == expected


def test_when_ranks_were_killed_between_two_checkpoints_the_one_that_all_have_counts(
    gang2: Any, tmp_path: Path
) -> None:
    run(gang2, contenders={"x": "bf16"}, steps=4, chunk=2, checkpoint=str(tmp_path / "a"))
    torn = copy(tmp_path / "a", tmp_path / "torn")
    run(gang2, contenders={"x": "bf16"}, steps=6, chunk=2, checkpoint=str(tmp_path / "a"), resume=True)
    (torn / "step6-rank0.pt").write_bytes((tmp_path / "a" / "step6-rank0.pt").read_bytes())
    _, events = run(gang2, contenders={"x": "bf16"}, steps=8, checkpoint=str(torn), resume=True)
    assert of(events, "contender")[0]["done"] == 4
    assert names(torn) == ["step8-rank0.pt", "step8-rank1.pt"]


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (
            {"contenders": {"x": "terngrad"}},
            "its recipe was 'scatter(bf16())', and is 'scatter(ternary(), answer=qsgd(bits=3))' now",
        ),
        ({"seed": 3}, "its seed was 0, and is 3 now"),
        ({"workload": "logistic"}, "its workload was 'ridge', and is 'logistic' now"),
        ({"network": "200mbit"}, "its network was 'unshaped', and is '200mbit' now"),
        ({"lr": {"x": 2.0}}, "its --lr was 1.0, and is 2.0 now"),
        ({"slow": ["1:5"]}, "its --slow was [], and is ['1:5'] now"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(gang2: Any, four_steps: Path, other: dict[str, Any], what: str) -> None:
    code, error = resume(gang2, four_steps, **other)
    assert code == 1
    assert what in error


def test_a_damaged_checkpoint_is_named(gang2: Any, four_steps: Path) -> None:
    damaged = four_steps / "step4-rank1.pt"
    damaged.write_bytes(damaged.read_bytes()[:100])
    code, error = resume(gang2, four_steps)
    assert code == 1
    assert f"{damaged} cannot be read" in error


def test_a_checkpoint_with_a_turned_bit_is_named(gang2: Any, four_steps: Path) -> None:
    """In its data, where nothing but a check sum tells."""
    damaged = four_steps / "step4-rank1.pt"
    weights = next(iter(torch.load(damaged, weights_only=True)["state"]["model"].values()))
    raw = bytearray(damaged.read_bytes())
    raw[raw.index(weights.numpy().tobytes()) + 2] ^= 1
    damaged.write_bytes(raw)
    torch.load(damaged, weights_only=True)
    code, error = resume(gang2, four_steps)
    assert code == 1
    assert f"rank 1: {damaged} cannot be read: it is damaged or cut short" in error


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda saved: [1, 2], "is not a checkpoint of a run"),
        (lambda saved: {"state": saved["state"]}, "is not a checkpoint of a run"),
        (lambda saved: {**saved, "state": {}}, "does not fit this run"),
        (
            lambda saved: {**saved, "state": {**saved["state"], "model": {}}},
            "does not fit this run: its model lacks '",
        ),
    ],
)
def test_a_file_with_something_else_in_it_is_named(
    gang2: Any, four_steps: Path, change: Callable[[Any], Any], what: str
) -> None:
    other = four_steps / "step4-rank1.pt"
    torch.save(change(torch.load(other, weights_only=True)), other)
    code, error = resume(gang2, four_steps)
    assert code == 1
    assert f"{other} {what}" in error


def on_a_small_disk(rank: int, size: int, facts: dict[str, Any], victim: int) -> Any:
    """One rank may write nothing but very small files: it meets the limit in the middle of its checkpoint."""
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        return trial(rank, size, facts, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk_costs_a_checkpoint_but_not_the_last_one_and_not_the_run(
    gang2: Any, tmp_path: Path, victim: int
) -> None:
    plan = {"contenders": {"x": "bf16"}, "workload": "ridge", "deadline": 30.0, "chunk": 2, "checkpoint": str(tmp_path)}
    run(gang2, **{**plan, "steps": 4})
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    code, events = gang2.run(on_a_small_disk, {**plan, "steps": 8, "checkpoint_every": 2, "resume": True}, victim)[0]
    assert code == 0
    assert len(steps(events, "x")) == 4
    notes = [e["text"] for e in of(events, "note")]
    assert len(notes) == 2
    assert notes[0] == f"no checkpoint at step 6: rank {victim}: File too large; the last checkpoint is kept"
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before


def interrupted_while_it_writes(rank: int, size: int, facts: dict[str, Any]) -> Any:
    def half(state: Any, file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", half)
        try:
            return trial(rank, size, facts, {})
        except KeyboardInterrupt:
            return "interrupted"


def test_an_interrupt_in_the_middle_of_a_checkpoint_leaves_none_half_written(gang2: Any, tmp_path: Path) -> None:
    plan = {"contenders": {"x": "bf16"}, "chunk": 2, "checkpoint": str(tmp_path)}
    run(gang2, **plan, steps=4)
    facts = {"workload": "ridge", "deadline": 30.0, **plan, "steps": 6, "resume": True}
    assert gang2.run(interrupted_while_it_writes, facts) == ["interrupted", "interrupted"]
    assert names(tmp_path) == ["step4-rank0.pt", "step4-rank1.pt"]


def on_a_disk_that_turns_read_only(rank: int, size: int, facts: dict[str, Any], victim: int, after: str) -> Any:
    """From a point in its checkpoint on, one rank's folder can no longer be changed."""
    frozen = False

    def patched(name: str, owner: Any) -> Any:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal frozen
            if frozen:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            done = real(*args, **kwargs)
            frozen = name == after
            return done

        return call

    with pytest.MonkeyPatch.context() as patch:
        if rank == victim:
            for name, owner in (("save", torch), ("replace", os), ("unlink", Path)):
                patch.setattr(owner, name, patched(name, owner))
        return trial(rank, size, facts, {})


@pytest.mark.parametrize(("after", "said"), [("save", ["rank 1: Read-only file system"]), ("replace", [])])
def test_a_folder_that_turns_read_only_in_the_middle_fails_nobody(
    gang2: Any, tmp_path: Path, after: str, said: list[str]
) -> None:
    plan = {"contenders": {"x": "bf16"}, "workload": "ridge", "deadline": 30.0, "chunk": 2, "checkpoint": str(tmp_path)}
    run(gang2, **{**plan, "steps": 4})
    facts = {**plan, "steps": 6, "resume": True}
    answers = gang2.run(on_a_disk_that_turns_read_only, facts, 1, after)
    assert [code for code, _ in answers] == [0, 0]
    notes = [e["text"] for e in of(answers[0][1], "note")]
    assert notes == [f"no checkpoint at step 6: {why}; the last checkpoint is kept" for why in said]
    code, _ = resume(gang2, tmp_path)
    assert code == 0


def test_a_checkpoint_takes_the_place_of_what_an_earlier_run_had_half_written(gang2: Any, tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f".gossamer-step3-rank{rank}-0123abcd.part").touch()
    run(gang2, contenders={"x": "bf16"}, steps=4, checkpoint=str(tmp_path))
    assert names(tmp_path) == ["step4-rank0.pt", "step4-rank1.pt"]


def test_files_of_others_are_neither_removed_nor_written_over(gang2: Any, tmp_path: Path) -> None:
    others = ["step2-rank0.pt", "step8-rank1.pt", "step2-rank0.part"]
    for name in others:
        (tmp_path / name).write_text("another's")
    (tmp_path / "elsewhere").write_text("another's")
    (tmp_path / "step4-rank0.pt").symlink_to("elsewhere")
    plan = {"contenders": {"x": "bf16"}, "chunk": 2, "checkpoint_every": 2, "checkpoint": str(tmp_path)}
    code, events = run(gang2, **plan, steps=8)
    assert code == 0
    assert [e["text"].partition(": rank")[0] for e in of(events, "note")] == [
        f"no checkpoint at step {n}" for n in (2, 4, 8)
    ]
    assert names(tmp_path) == sorted(["elsewhere", *others, "step4-rank0.pt", "step6-rank0.pt", "step6-rank1.pt"])
    assert {(tmp_path / name).read_text() for name in ("elsewhere", "step4-rank0.pt", *others)} == {"another's"}


def test_files_of_others_are_not_taken_for_checkpoints(tmp_path: Path) -> None:
    for name in (
        "step7-rank0.pt",
        "step12-rank0.pt",
        "step9-rank1.pt",
        "step8-rank0.part",
        "stepx-rank0.pt",
        "step3-rank0.pt.bak",
    ):
        (tmp_path / name).touch()
    assert saved_steps(tmp_path, 0) == [7, 12]
    assert saved_steps(tmp_path / "nowhere", 0) == []
