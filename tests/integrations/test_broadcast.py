"""All ranks start alike: model, buffers, and what the optimizer remembers."""

from typing import Any

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import Awkward, attached, flat, loss_of, same
from torch import Tensor, nn

import gossamer
from gossamer.core.errors import PeerError
from gossamer.fabrics.sim import simulate
from gossamer.integrations import broadcast

pytestmark = pytest.mark.gang

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.05, "amsgrad": True}),
    "asgd": (torch.optim.ASGD, {"lr": 0.05}),
}


def made(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    make, options = OPTIMIZERS[kind]
    return make(model.parameters(), **options)


def after_training_alone(rank: int, size: int, kind: str, steps: list[int]) -> tuple[Tensor, dict[str, Any]]:
    """Ranks trained each for themselves, one of them perhaps not at all; then they attach."""
    model = Awkward()
    optimizer = made(model, kind)
    for step in range(steps[rank]):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    with gossamer.attach(model, optimizer, "allreduce", deadline=20.0) as comm:
        broadcast = optimizer.state_dict()["state"]
        started = {f"{i}/{k}": v.clone() for i, s in broadcast.items() for k, v in s.items() if isinstance(v, Tensor)}
        for step in range(1, 4):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            comm.check_sync()
        return flat(model), started


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("steps", [[3, 2], [2, 0], [0, 2]])
def test_optimizer_state_starts_as_rank_0_has_it(gang2: Gang, kind: str, steps: list[int]) -> None:
    (a, at_zero), (b, at_one) = gang2.run(after_training_alone, kind, steps)
    assert bool(at_zero) == (steps[0] > 0)
    assert at_zero.keys() == at_one.keys()
    assert all(same(at_zero[k], at_one[k]) for k in at_zero)
    assert same(a, b)


def unlike(rank: int, size: int) -> str:
    model = Awkward()
    with pytest.raises(PeerError) as caught:
        gossamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1)), "allreduce")
    return str(caught.value)


def test_other_rates_on_other_ranks_are_an_error(gang2: Gang) -> None:
    for said in gang2.run(unlike):
        assert "the optimizer's group 0" in said
        assert "'lr': '0.2'" in said


class Muon(torch.optim.Optimizer):
    """Steps in the direction of the gradient's orthogonal factor; for matrices."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.any():
                    u, _, v = torch.linalg.svd(p.grad, full_matrices=False)
                    p.sub_(u @ v, alpha=group["lr"])


def two(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() > 1 and p.numel()]
    others = [p for p in model.parameters() if p.dim() < 2 or not p.numel()]
    return [Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.05)]


def stepped_by_two(rank: int, size: int, recipe: str) -> tuple[Tensor, Tensor]:
    """Two optimizers share a model; and the same in one process on both ranks' data."""
    with attached(recipe, optimizer=two) as (model, optimizers, comm):
        for step in range(1, 5):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            for optimizer in optimizers:
                optimizer.step()
            assert comm.step == step
        comm.check_sync()
        together = flat(model)
    alone = Awkward()
    optimizers = two(alone)
    for step in range(1, 5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (sum(loss_of(alone, r, step) for r in range(size)) / size).backward()
        for optimizer in optimizers:
            optimizer.step()
    return together, flat(alone)


def test_two_optimizers_make_one_step(gang2: Gang) -> None:
    for together, alone in gang2.run(stepped_by_two, "allreduce"):
        torch.testing.assert_close(together, alone, rtol=2e-4, atol=2e-5)
    (a, _), (b, _) = gang2.run(stepped_by_two, "topk(ratio=0.3) + local_sgd(2)")
    assert same(a, b)


def one_of_two(rank: int, size: int) -> list[str]:
    model = Awkward()
    with (
        pytest.warns(UserWarning, match="no optimizer") as caught,
        gossamer.attach(model, two(model)[1], "local_sgd(2)"),
    ):
        pass
    return [str(w.message) for w in caught]


def test_parameters_that_no_optimizer_steps_are_named(gang2: Gang) -> None:
    for said in gang2.run(one_of_two):
        assert len(said) == 1
        assert "no optimizer given to attach steps 'matrix' and 1 more parameters" in said[0]


def taking_turns(rank: int, size: int) -> tuple[int, int]:
    """Each steps after a backward of its own; a scaler-less GAN's loop with one attach."""
    with attached("allreduce", optimizer=two) as (model, optimizers, comm):
        loss_of(model, rank, 1).backward()
        optimizers[0].step()
        with pytest.warns(UserWarning, match="For optimizers that take turns, call attach once for each"):
            loss_of(model, rank, 2).backward()
        for step in (3, 4):
            optimizers[step % 2].step()
            loss_of(model, rank, step).backward()
        return comm.step, int(comm.metrics()["skipped_steps"])


def test_optimizers_that_take_turns_are_told_so(gang2: Gang) -> None:
    assert gang2.run(taking_turns) == [(3, 0)] * 2


def test_a_model_is_handed_out_a_bucket_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So much room it takes beside the model, whatever the model's size; every bit of every type arrives."""
    monkeypatch.setattr(broadcast, "BUCKET", 256)

    def tensors(rank: int) -> list[Tensor]:
        rng = torch.Generator().manual_seed(rank)
        long = torch.randn(300, generator=rng)
        halves = torch.randn(5, 3, generator=rng).half().t()
        flags = torch.rand(7, generator=rng) > 0.5
        return [long, halves, flags, torch.zeros(0), torch.tensor(rank), torch.randn((), generator=rng).double()]

    ranks = [tensors(rank) for rank in range(3)]
    told = simulate([broadcast.broadcast(ts, torch.device("cpu"), gives=r == 0) for r, ts in enumerate(ranks)])
    assert all(same(a, b) for ts in ranks for a, b in zip(ts, tensors(0), strict=True))
    assert {entry.handed for entry in told.ledger.entries} <= set(range(257))
