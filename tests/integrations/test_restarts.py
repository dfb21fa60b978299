"""torchrun starts killed ranks again, and the run ends with the model of an unbroken one, bit for bit."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.marked import LEAN
from torch import nn

import gossamer
from gossamer.core.errors import CheckpointError, PeerError
from gossamer.fabrics.liveness.store import default_store
from gossamer.fabrics.torch import endpoint
from gossamer.integrations.checkpoint import Resumed

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "resumable.py"
DIES = Path(__file__).parent / "scripts" / "dies.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3")


def torchrun(*words: str | Path) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": LEAN, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [sys.executable, "-W", "ignore", *TORCHRUN, *map(str, words)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def model_in(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "model.pt", weights_only=True)


@pytest.mark.gang
def test_a_run_that_is_over_before_its_first_checkpoint_keeps_its_model(tmp_path: Path) -> None:
    torchrun(EXAMPLE, tmp_path / "runs" / "7", "--steps", "2")
    assert "0.weight" in model_in(tmp_path / "runs" / "7")


def _is_as_unbroken(folder: Path, recipe: str, kills: str, found: list[str], *short: str) -> None:
    torchrun(EXAMPLE, folder / "unbroken", "--recipe", recipe, *short)
    said = torchrun(DIES, kills, EXAMPLE, folder / "killed", "--recipe", recipe, *short)
    resumed = [line.rpartition("/")[2] for line in said.splitlines() if line.startswith("resumed from")]
    assert resumed == found
    wanted = model_in(folder / "unbroken")
    assert all(torch.equal(t, wanted[name]) for name, t in model_in(folder / "killed").items())


@pytest.mark.gang
@pytest.mark.slow
def test_a_run_that_is_killed_and_started_again_is_as_unbroken(tmp_path: Path) -> None:
    _is_as_unbroken(tmp_path, "topk", "7", ["step4"], "--steps", "12", "--every", "4")


@pytest.mark.gang
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["topk", "local_sgd(4)"])
def test_a_run_that_is_killed_three_times_is_as_unbroken(tmp_path: Path, recipe: str) -> None:
    _is_as_unbroken(tmp_path, recipe, "15,23,7", ["step10", "step30", "step30"])


# -- what resume finds -----------------------------------------------------------------------------------------------------


def fresh() -> Any:
    model = nn.Linear(2, 1)
    return gossamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "allreduce")


def trained(folder: Path, steps: int) -> None:
    with fresh() as comm:
        for _ in range(steps):
            comm.optimizers[0].zero_grad()
            comm.model(torch.ones(1, 2)).sum().backward()
            comm.optimizers[0].step()
        gossamer.checkpoint.save(comm, folder, {"steps": steps})


def test_the_highest_step_is_the_newest_whatever_its_name(tmp_path: Path) -> None:
    trained(tmp_path / "b", 9)
    trained(tmp_path / "a", 10)
    (tmp_path / "notes").mkdir()
    with fresh() as comm:
        found = gossamer.checkpoint.resume(comm, tmp_path)
        assert comm.step == 10
    assert found == Resumed(str(tmp_path), "a", {"steps": 10}, ())


def test_a_save_that_was_cut_off_is_passed_over_and_named(tmp_path: Path) -> None:
    trained(tmp_path / "step1", 1)
    trained(tmp_path / "step2", 2)
    (tmp_path / "step2" / ".metadata").unlink()
    with fresh() as comm:
        said = str(gossamer.checkpoint.resume(comm, tmp_path))
    assert said == f"resumed from {tmp_path}/step1; passed over, since their saves were cut off: step2"


def test_a_checkpoint_that_is_half_deleted_does_not_keep_the_run_from_another_one(tmp_path: Path) -> None:
    """Whoever removes old ones may be killed in the midst of it."""
    for step in (1, 2, 3):
        trained(tmp_path / f"step{step}", step)
    for file in (tmp_path / "step1").glob("*.distcp"):
        file.unlink()
    (tmp_path / "step2" / ".metadata").write_bytes(b"")
    with fresh() as comm:
        said = str(gossamer.checkpoint.resume(comm, tmp_path))
    assert said == f"resumed from {tmp_path}/step3; passed over, since their saves were cut off: step1, step2"


@pytest.mark.parametrize("make", [True, False])
def test_a_folder_without_a_complete_checkpoint_is_told(tmp_path: Path, make: bool) -> None:
    folder = tmp_path / "runs"
    if make:
        folder.mkdir()
    with fresh() as comm:
        found = gossamer.checkpoint.resume(comm, folder)
        assert comm.step == 0
    assert str(found) == f"{folder} holds no complete checkpoint, so training begins anew"


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with fresh() as comm, pytest.raises(CheckpointError, match="runs is not a folder: pass the one in which each save"):
        gossamer.checkpoint.resume(comm, tmp_path / "runs")


def apart(rank: int, size: int, folder: str) -> str:
    with fresh() as comm, pytest.raises(CheckpointError) as refused:
        gossamer.checkpoint.resume(comm, f"{folder}/{rank}")
    return str(refused.value)


@pytest.mark.gang
def test_ranks_that_see_other_folders_are_told_so(gang2: Any, tmp_path: Path) -> None:
    trained(tmp_path / "0" / "step3", 3)
    for rank, said in enumerate(gang2.run(apart, str(tmp_path))):
        assert said.startswith(
            f"the ranks do not see the same checkpoints in {tmp_path}/{rank}: rank 1 lacks step3. Give"
        )


# -- a store that outlives its ranks ---------------------------------------------------------------------------------------


def in_an_old_store(rank: int, size: int) -> str:
    name = f"gossamer/{dist.group.WORLD.group_name}/0"
    key = f"{name}/{endpoint._made[name] + 1}/pulse/{rank}"
    default_store().set(key, "of a rank that was killed")
    try:
        with pytest.raises(PeerError) as caught:
            fresh()
    finally:
        default_store().delete_key(key)
    dist.barrier()
    with fresh() as comm:
        assert comm.size == size
    return str(caught.value)


@pytest.mark.gang
def test_ranks_that_are_started_again_with_an_old_store_are_told_so(gang2: Any) -> None:
    for rank, said in enumerate(gang2.run(in_an_old_store)):
        assert f"rank {rank} was started again with the store of the ranks before" in said
        assert "Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun" in said


def test_a_restart_that_would_fail_is_warned_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"USE_AGENT_STORE": "True", "MAX_RESTARTS": "3"}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(UserWarning, match="torchrun may start the ranks again, but they share its store"):
        fresh().detach()
    for name, value in {"RANK": "1", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"}.items():
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            fresh().detach()


@pytest.mark.gang
@pytest.mark.slow
def test_a_signal_lets_the_example_save_and_end_well(tmp_path: Path) -> None:
    said = torchrun(DIES, "-9", EXAMPLE, tmp_path, "--steps", "4000", "--every", "4000")
    stopped = int(said.rpartition("trained to step ")[2].split()[0])
    assert 9 <= stopped < 4000
    assert (tmp_path / f"step{stopped}" / ".metadata").exists()
