"""Law 6 on real processes: save anywhere, resume, and no bit differs; distributed checkpoints move to other worlds."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.gang import Gang
from tests.integrations.loops import SMALL, Awkward, attached, flat, same, small_step
from torch import Tensor, nn

from gossamer.core.errors import CheckpointError
from gossamer.integrations import checkpoint

pytestmark = pytest.mark.gang

ROUND = 3
SAVED = (1, 2, 3)  # after each step of a round; after each of two it is the law on the simulator


def interrupted(rank: int, size: int, recipe: str) -> list[list[Tensor]]:
    """Parameters after each step: of a whole run, then of runs saved after some steps and resumed by new objects."""
    files = list[bytes]()
    whole = list[Tensor]()
    with attached(recipe) as (model, optimizer, comm):
        while comm.step < 2 * ROUND:
            small_step(model, optimizer, comm, rank)
            whole.append(flat(model))
            file = io.BytesIO()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "comm": comm.state_dict()}
            torch.save(state, file)
            files.append(file.getvalue())
    out = [whole]
    for step in SAVED:
        out.append(whole[:step])
        with attached(recipe, seed=99) as (model, optimizer, comm):
            state = torch.load(io.BytesIO(files[step - 1]), weights_only=True)
            comm.load_state_dict(state["comm"])
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            while comm.step < 2 * ROUND:
                small_step(model, optimizer, comm, rank)
                out[-1].append(flat(model))
            comm.check_sync()
    return out


RECIPES = [
    "topk(ratio=0.1)" + SMALL,
    "powersgd" + SMALL,
    "scatter(qsgd(bits=4, bucket=16)) + diana(momentum=0.5)" + SMALL,
    "terngrad",
    "scatter(qsgd(bits=4, bucket=16)) + slowmo(3)" + SMALL,
    "slowmo_sgp(3)",
    "topk(ratio=0.2) + overlap_local_sgd(3)" + SMALL,
    "scatter(qsgd(bits=4, bucket=16)) + post_local(2, cocod(2))" + SMALL,
    "topk(ratio=0.2) + streaming(3, 3, 2)" + SMALL,
    "topk(ratio=0.1) + delayed()" + SMALL,
    "allreduce + slowmo(3, inner=gossip(overlap=True))",
    "osgp(every=2)" + SMALL,
    "accordion(epoch=2, mild=3, harsh=1, interval=1, threshold=0.1)" + SMALL,
    "accordion_batch(epoch=2, factor=4, interval=1, threshold=1000.0)",
    "scatter(qsgd()) + backup_workers(backups=0)",
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_run_differs_in_no_bit(gang2: Gang, recipe: str) -> None:
    for whole, *resumed in gang2.run(interrupted, recipe):
        for step, run in zip(SAVED, resumed, strict=True):
            assert len(run) == len(whole)
            assert all(same(a, b) for a, b in zip(run, whole)), f"saved after step {step}"


@pytest.mark.parametrize("recipe", ["topk(ratio=0.2) + hierarchical(1, 2, slowmo(3))" + SMALL])
def test_a_resumed_run_of_groups_differs_in_no_bit(gang4: Gang, recipe: str) -> None:
    for whole, *resumed in gang4.run(interrupted, recipe):
        assert all(len(run) == len(whole) and all(map(same, run, whole)) for run in resumed)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """It keeps nothing, so that parameters and communicator are all there is."""
    return torch.optim.SGD(model.parameters(), lr=0.05)


def save_together(rank: int, size: int, recipe: str, path: str, steps: int) -> tuple[dict[str, Any], Tensor]:
    with attached(recipe, optimizer=plain_sgd) as (model, optimizer, comm):
        while comm.step < steps:
            small_step(model, optimizer, comm, rank)
        dcp.save({"model": model.state_dict(), "comm": comm}, checkpoint_id=path)
        state = comm.state_dict()
        small_step(model, optimizer, comm, rank)
        return state, flat(model)


def load_together(rank: int, size: int, recipe: str, path: str) -> tuple[dict[str, Any], Tensor]:
    with attached(recipe, optimizer=plain_sgd, seed=98) as (model, optimizer, comm):
        state = model.state_dict()
        dcp.load({"model": state}, checkpoint_id=path)
        model.load_state_dict(state)
        checkpoint.load(comm, path)
        state = comm.state_dict()
        small_step(model, optimizer, comm, rank)
        comm.check_sync()
        return state, flat(model)


DCP = [
    "topk(ratio=0.1)" + SMALL,
    "scatter(topk(ratio=0.2)) + error_feedback()" + SMALL,
    "powersgd" + SMALL,
    "diana(bits=4, bucket=16)" + SMALL,
]


@pytest.mark.parametrize("recipe", DCP)
def test_a_distributed_checkpoint_is_taken_up(gang2: Gang, recipe: str, tmp_path: Path) -> None:
    saved = gang2.run(save_together, recipe, str(tmp_path), 4)
    loaded = gang2.run(load_together, recipe, str(tmp_path))
    for (before, model), (after, again) in zip(saved, loaded, strict=True):
        assert before.keys() == after.keys()
        assert all(same(v, after[k]) if isinstance(v, Tensor) else v == after[k] for k, v in before.items())
        assert same(model, again)  # after one step more


def summed(states: list[dict[str, Any]], prefix: str) -> dict[str, Tensor]:
    out = dict[str, Tensor]()
    for rank, state in enumerate(states):
        for key, value in state.items():
            if key.startswith(f"rank{rank}/{prefix}/"):
                name = key.removeprefix(f"rank{rank}/{prefix}/")
                out[name] = out.get(name, 0.0) + value.double()
    return out


@pytest.mark.parametrize("recipe", DCP)
def test_half_the_ranks_keep_the_mean_of_what_was_remembered(
    gang4: Gang, gang2: Gang, recipe: str, tmp_path: Path
) -> None:
    saved = [s for s, _ in gang4.run(save_together, recipe, str(tmp_path), 4)]
    loaded = [s for s, _ in gang2.run(load_together, recipe, str(tmp_path))]
    remembered = "memory/own" if "diana" in recipe else "memory/residual"
    old, new = summed(saved, remembered), summed(loaded, remembered)
    assert old.keys() == new.keys() != set()
    for name in old:
        torch.testing.assert_close(new[name] / 2, old[name] / 4, rtol=1e-5, atol=1e-7)
    owed, still = summed(saved, "exchange/owed"), summed(loaded, "exchange/owed")
    assert bool(owed) == ("scatter" in recipe)
    for name in owed:
        torch.testing.assert_close(still[name], owed[name], rtol=1e-5, atol=1e-7)
    assert all(state["step"] == 5 for state in loaded)


def mistaken(rank: int, size: int, path: str) -> list[str]:
    said = list[str]()
    with attached("qsgd") as (model, optimizer, comm):
        small_step(model, optimizer, comm, rank)
        state = comm.state_dict()
    with attached("terngrad") as (_, _, comm):
        for wrong in (state, {"model": 1}):
            with pytest.raises(CheckpointError) as caught:
                comm.load_state_dict(wrong)
            said.append(str(caught.value))
        dcp.save({"other": {"x": torch.zeros(2)}}, checkpoint_id=path)
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(comm, path)
        said.append(str(caught.value))
    return said


def test_what_does_not_belong_here_is_refused(gang2: Gang, tmp_path: Path) -> None:
    for recipe, kind, key in gang2.run(mistaken, str(tmp_path)):
        assert "scatter(qsgd(bucket=128))" in recipe
        assert "scatter(ternary(), answer=qsgd(bits=3))" in recipe
        assert "not a checkpoint" in kind
        assert "holds nothing under 'comm'; it was saved under ['other']" in key


def rolled_back(rank: int, size: int, recipe: str) -> bool:
    """The same communicator goes back to an earlier state; backup workers cannot, and say so."""
    with attached(recipe, Awkward()) as (model, optimizer, comm):
        for _ in range(2):
            small_step(model, optimizer, comm, rank)
        state = comm.state_dict(), {n: t.clone() for n, t in model.state_dict().items()}, optimizer.state_dict()
        if "backup" in recipe:
            with pytest.raises(CheckpointError, match="before the first step"):
                comm.load_state_dict(state[0])
            return True
        buffers = {
            k: {n: t.clone() for n, t in v.items() if isinstance(t, Tensor)} for k, v in state[2]["state"].items()
        }
        runs = list[Tensor]()
        for _ in range(2):
            comm.load_state_dict(state[0])
            model.load_state_dict(state[1])
            optimizer.load_state_dict(
                {**state[2], "state": {k: {n: t.clone() for n, t in v.items()} for k, v in buffers.items()}}
            )
            for _ in range(3):
                small_step(model, optimizer, comm, rank)
            runs.append(flat(model))
        return same(*runs)


@pytest.mark.parametrize(
    "recipe", ["topk(ratio=0.1)" + SMALL, "osgp(every=2)", "qsgd + overlap_local_sgd(2)", "backup(backups=0)"]
)
def test_a_run_goes_back(gang2: Gang, recipe: str) -> None:
    assert gang2.run(rolled_back, recipe) == [True, True]
