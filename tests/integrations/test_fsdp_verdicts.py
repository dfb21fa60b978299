"""What one shard of one rank spoils, all shards of all ranks hear of: else a model would be put together of two."""

import warnings
from typing import Any

import pytest
import torch
from tests.gang import Gang, GangError
from tests.integrations.loops import DEADLINE, SEED, usual
from tests.integrations.sharded import batch, cut, dense, mesh_of
from torch import Tensor, nn

import gossamer
from gossamer.runtime import WholeReplica

pytestmark = [
    pytest.mark.gang,
    pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP2 trains on processors since torch 2.13"),
]
SPOILT, STEPS = 3, 6
# One recipe for each kind of memory.
MEMORIES = ["topk(ratio=0.3)", "diana", "ef21", "dgc", "local_gradients", "demo", "powersgd(rank=1)", "onebit_sgd"]


class Given(torch.autograd.Function):
    """Adds nothing, and gives a parameter the gradient that it is told."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return ctx.saved_tensors[0], None


class Spoilable(nn.Module):
    """The first row of `extra` lies in the first shard."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.extra = dense(), nn.Parameter(torch.ones(4))
        self.given = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + Given.apply(self.extra, self.given)


def held(state: dict[str, Any]) -> dict[str, Tensor]:
    """Memories and whatever else is kept for a step, without what counts steps."""
    return {k: v.clone() for k, v in state.items() if isinstance(v, Tensor)}


def spoiling(rank: int, size: int, recipe: str, asks: bool = True) -> tuple[bool, bool, bool, dict[int, int]]:
    mesh = mesh_of(2)
    model = Spoilable()
    for block in model.net:
        if isinstance(block, nn.Linear):
            cut(block, mesh, blocks=False)
    cut(model, mesh, blocks=False)
    optimizer = usual(recipe)(model)
    with gossamer.attach(model, optimizer, recipe, seed=SEED, deadline=DEADLINE) as comm:
        if not asks:
            comm.worker.replica = WholeReplica()
        kept = changed = fine = True
        for step in range(1, STEPS + 1):
            before = held(comm.state_dict())
            optimizer.zero_grad()
            model.given = torch.zeros(4)
            if (rank, step) == (0, SPOILT):  # FSDP2 sums it over the shards of replica 0, into the first shard
                model.given[0] = float("inf")
            x, y = batch(rank // 2, step, rank % 2)
            (model(x) - y).square().mean().backward()
            if (
                step == SPOILT
            ):  # as `nan_to_num_` does it in some loops: the step is taken, and memories must not know of it
                for p in model.parameters():
                    p.grad.zero_()
            optimizer.step()
            after = held(comm.state_dict())
            alike = before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
            if step == SPOILT:
                kept = alike
            elif step > 1:
                changed &= not alike
            fine &= all(v.isfinite().all() for v in after.values() if v.is_floating_point())
        comm.check_sync()
        return kept, changed, fine, comm.spoilt


@pytest.mark.parametrize("recipe", MEMORIES)
def test_an_inf_in_one_shard_leaves_all_memories_as_they_were(gang4: Gang, recipe: str) -> None:
    for rank, (kept, changed, fine, spoilt) in enumerate(gang4.run(spoiling, recipe)):
        assert (kept, changed, fine) == (True, True, True), f"rank {rank}"
        assert spoilt == {0: 1}


def test_without_the_verdict_it_would_not(gang4: Gang) -> None:
    """So the test above can fail."""
    try:
        kept = [kept for kept, _, _, _ in gang4.run(spoiling, "topk(ratio=0.3)", False)]
    except GangError:
        return
    assert kept == [True, False, True, False]


def rounds(rank: int, size: int, recipe: str) -> tuple[bool, float, dict[int, int]]:
    """One rank's own model is spoilt in one shard, in the midst of a round."""
    mesh = mesh_of(2)
    model = cut(dense(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with warnings.catch_warnings(), gossamer.attach(model, optimizer, recipe, seed=SEED, deadline=DEADLINE) as comm:
        warnings.filterwarnings("ignore", ".*was not finite")
        for step in range(1, 13):
            optimizer.zero_grad()
            x, y = batch(rank // 2, step, rank % 2)
            (model(x) - y).square().mean().backward()
            if (rank, step) == (3, 5):
                part: Any = next(iter(model.parameters())).grad
                part.to_local().fill_(float("nan"))
            optimizer.step()
        comm.finish()
        fine = all(bool(p.to_local().isfinite().all()) for p in model.parameters())  # pyright: ignore
        return fine, comm.metrics()["dropped_rounds"], comm.spoilt


@pytest.mark.parametrize(
    "recipe", ["slowmo(4)", "scatter(qsgd()) + local_sgd(4)", "cocod(4)", "sgp", "d_psgd", "choco_sgd"]
)
def test_a_model_that_is_spoilt_in_one_shard_is_given_up_whole(gang4: Gang, recipe: str) -> None:
    answers = gang4.run(rounds, recipe)
    assert all(fine for fine, _, _ in answers)
    assert len({dropped for _, dropped, _ in answers}) == 1
    assert answers[2][2] == answers[3][2]  # the two shards of the replica that was spoilt
    assert any(dropped > 0 or spoilt for _, dropped, spoilt in answers)
