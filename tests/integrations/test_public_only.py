"""Another recipe goes on from what is public of a checkpoint: the consensus and the mean of the optimizers' states."""

from typing import Any

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import SMALL, attached, flat, same, small_step
from torch import Tensor, nn

import gossamer
from gossamer.core.errors import CheckpointError

pytestmark = pytest.mark.gang
save, load = gossamer.checkpoint.save, gossamer.checkpoint.load


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def momenta(optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.cat([state["exp_avg"].reshape(-1) for state in optimizer.state.values()]).clone()


def saved(rank: int, size: int, path: str) -> tuple[Tensor, Tensor]:
    """In the midst of a round: each rank has a model and an optimizer of its own."""
    with attached("local_sgd(4)" + SMALL, optimizer=adam) as (model, optimizer, comm):
        while comm.step < 6:
            small_step(model, optimizer, comm, rank)
        save(comm, path, {"epoch": 2})
        with comm.consensus():
            return flat(model), momenta(optimizer)


def goes_on(rank: int, size: int, path: str) -> tuple[Tensor, Tensor, int, Any, str, Tensor]:
    with attached("topk(ratio=0.3)" + SMALL, optimizer=adam, seed=99) as (model, optimizer, comm):
        with pytest.raises(CheckpointError, match="the checkpoint was made with"):
            load(comm, path)
        extra = load(comm, path, public_only=True)
        found, kept, step = flat(model), momenta(optimizer), comm.step
        for _ in range(3):
            small_step(model, optimizer, comm, rank)
        comm.check_sync()
        with pytest.raises(CheckpointError) as caught:
            load(comm, path, public_only=True)
        return found, kept, step, extra, str(caught.value), flat(model)


def test_it_begins_at_the_consensus_with_the_mean_of_the_optimizers(gang2: Gang, tmp_path: Any) -> None:
    path = str(tmp_path / "step6")
    (consensus, first), (_, second) = gang2.run(saved, path)
    assert not same(first, second)
    for found, kept, step, extra, said, _ in gang2.run(goes_on, path):
        assert same(found, consensus)
        torch.testing.assert_close(kept, (first + second) / 2)
        assert (step, extra) == (0, {"epoch": 2})
        assert "public_only=True begins with memories at zero, but 3 steps were taken already" in said


def test_another_number_of_ranks_begins_so_too(gang2: Gang, gang3: Gang, tmp_path: Any) -> None:
    path = str(tmp_path / "step6")
    (consensus, _), _ = gang2.run(saved, path)
    ends = gang3.run(goes_on, path)
    assert all(same(found, consensus) and same(end, ends[0][-1]) for found, *_, end in ends)


def without_a_model(rank: int, size: int, path: str) -> str:
    import torch.distributed.checkpoint as dcp

    with attached("topk(ratio=0.3)" + SMALL) as (_, _, comm):
        dcp.save({"comm": comm.state_dict()}, checkpoint_id=path)
        with pytest.raises(CheckpointError) as caught:
            load(comm, path, public_only=True)
        return str(caught.value)


def test_a_folder_without_a_model_is_refused(gang2: Gang, tmp_path: Any) -> None:
    for said in gang2.run(without_a_model, str(tmp_path / "bare")):
        assert "needs what gossamer.checkpoint.save() has written" in said
