"""Optimizers that are more than one, or do more than step: SAM, ZeRO, two on one model, a compiled step."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import DEADLINE, flat, same
from tests.others.both import attach, both, close, ours, randn, said, settled, torch_may_deprecate
from torch import Tensor, nn

import gossamer
from gossamer.core.errors import AttachError

pytestmark = pytest.mark.gang

STEPS = 4


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner, self.outer = nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))


def loss_of(model: nn.Module, ranks: Sequence[int], step: int) -> Tensor:
    return (model(randn(ranks, step, 4, 6)) - randn(ranks, 100 + step, 4, 3)).square().mean()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization (Foret et al., arXiv 2010.01412): descend by the gradient at w + rho g / |g|."""

    def __init__(
        self, params: Any, base_optimizer: Callable[..., torch.optim.Optimizer], rho: float, **more: Any
    ) -> None:
        super().__init__(params, {"rho": rho, **more})
        self.base_optimizer = base_optimizer(self.param_groups, **more)
        self.param_groups = self.base_optimizer.param_groups

    def _all(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.stack([p.grad.norm() for p in self._all()]).norm() + 1e-12
        for p in self._all():
            self.state[p]["before"] = p.detach().clone()
            p.add_(p.grad, alpha=self.defaults["rho"] / float(norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self._all():
            p.copy_(self.state[p]["before"])
        self.base_optimizer.step()
        self.zero_grad()


def sam(ranks: Sequence[int], recipe: str) -> list[nn.Module]:
    model = Mlp()
    optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)
    comm = attach(model, optimizer.base_optimizer, recipe)
    for step in range(STEPS):
        with comm.no_sync():
            loss_of(model, ranks, step).backward()
        optimizer.first_step()
        loss_of(model, ranks, step).backward()
        optimizer.second_step()
    settled(comm, STEPS)
    comm.detach()
    return [model]


def sam_alone(size: int) -> Tensor:
    """As the paper has it on several accelerators: each goes to where its own gradient points, then gradients are averaged."""
    model = Mlp()
    optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)
    for step in range(STEPS):
        means = [torch.zeros_like(p) for p in model.parameters()]
        for rank in range(size):
            loss_of(model, [rank], step).backward()
            optimizer.first_step()
            loss_of(model, [rank], step).backward()
            for p, mean in zip(model.parameters(), means, strict=True):
                mean += p.grad / size
                p.data.copy_(optimizer.state[p]["before"])
            optimizer.zero_grad()
        for p, mean in zip(model.parameters(), means, strict=True):
            p.grad = mean
        optimizer.base_optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def test_sam_is_that_of_its_paper(gang2: Gang) -> None:
    for together in gang2.run(ours, sam, "allreduce"):
        close(together, [sam_alone(2)])


@pytest.mark.parametrize("recipe", ["topk(ratio=0.3)", "local_sgd(2)"])
def test_sam_ends_with_equal_models_under_other_recipes(gang2: Gang, recipe: str) -> None:
    (first,), (second,) = gang2.run(ours, sam, recipe)
    assert same(first, second)


def zero(ranks: Sequence[int], recipe: str | None) -> list[nn.Module]:
    with torch_may_deprecate():
        from torch.distributed.optim import ZeroRedundancyOptimizer

    model = Mlp()
    optimizer: Any = sgd(model)
    if recipe is not None:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    comm = attach(model, optimizer, recipe)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, ranks, step).backward()
        optimizer.step()
    settled(comm, STEPS)
    comm.detach()
    return [model]


def test_zero_is_one_process_on_both_ranks_data(gang2: Gang) -> None:
    for together, alone in gang2.run(both, zero):
        close(together, alone)


def local_zero(rank: int, size: int) -> str:
    with pytest.raises(AttachError) as caught:
        zero([rank], "local_sgd(2)")
    return str(caught.value)


def test_zero_under_a_recipe_of_local_steps_is_refused(gang2: Gang) -> None:
    for text in gang2.run(local_zero):
        assert "ZeroRedundancyOptimizer" in text


def two(ranks: Sequence[int], recipe: str | None, muon: bool = False) -> list[nn.Module]:
    """One optimizer for matrices and one for the rest, as with Muon; they step one after the other."""
    model = Mlp()
    matrices, others = ([p for p in model.parameters() if (p.dim() > 1) == wanted] for wanted in (True, False))
    kind: Any = torch.optim.Muon if muon else torch.optim.SGD
    optimizers = [kind(matrices, lr=0.05, momentum=0.9), torch.optim.AdamW(others, lr=0.01, eps=1e-5)]
    comm = attach(model, optimizers, recipe)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in optimizers]
    for step in range(STEPS):
        loss_of(model, ranks, step).backward()
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        model.zero_grad()
    settled(comm, STEPS)
    comm.detach()
    return [model]


def test_two_optimizers_are_one_process_on_both_ranks_data(gang2: Gang) -> None:
    for together, alone in gang2.run(both, two):
        close(together, alone)


@pytest.mark.parametrize("recipe", ["allreduce", "topk(ratio=0.3)", "local_sgd(2)", "slowmo(2)"])
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_and_adamw_end_with_equal_models(gang2: Gang, recipe: str) -> None:
    (first,), (second,) = gang2.run(ours, two, recipe, True)
    assert same(first, second)
    assert first.isfinite().all()


def not_optimizers(rank: int, size: int) -> list[str]:
    model, told = Mlp(), list[str]()
    sam_itself = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1)
    for given in (sam_itself, "sgd", [sgd(model), "sgd"], []):
        with pytest.raises(AttachError) as caught:
            gossamer.attach(model, given, "local_sgd(2)", deadline=DEADLINE)  # pyright: ignore
        told.append(str(caught.value))
    return told


def test_sam_itself_and_what_is_no_optimizer_are_refused_with_what_to_pass(gang2: Gang) -> None:
    for sam_itself, *others in gang2.run(not_optimizers):
        assert "base_optimizer" in sam_itself
        assert all("optimizer" in text for text in others)


def one_of_two(rank: int, size: int) -> list[str]:
    model = Mlp()
    matrices = torch.optim.SGD([p for p in model.parameters() if p.dim() > 1], lr=0.1)
    return said(lambda: attach(model, matrices, "local_sgd(2)").detach())


def test_a_second_optimizer_that_is_forgotten_is_a_warning(gang2: Gang) -> None:
    for (text,) in gang2.run(one_of_two):
        assert "inner.bias" in text
        assert "as a list" in text


def sparse_adam(rank: int, size: int) -> str:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True))
    with pytest.raises(AttachError) as caught:
        gossamer.attach(model, torch.optim.SparseAdam(model.parameters(), lr=0.1), "allreduce", deadline=DEADLINE)
    return str(caught.value)


def test_sparse_adam_is_refused_where_gradients_are_averaged(gang2: Gang) -> None:
    for text in gang2.run(sparse_adam):
        assert "SparseAdam" in text


def compiled(ranks: Sequence[int], recipe: str | None) -> list[nn.Module]:
    """`optimizer.step` under torch.compile, as PyTorch's recipe for foreach optimizers shows it."""
    torch._dynamo.reset()
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5)
    comm = attach(model, optimizer, recipe)
    step_of = torch.compile(lambda: optimizer.step(), backend="eager")
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, ranks, step).backward()
        with torch_may_deprecate():
            step_of()
    settled(comm, STEPS)
    comm.detach()
    return [model]


def test_a_compiled_step_is_one_process_on_both_ranks_data(gang2: Gang) -> None:
    for together, alone in gang2.run(both, compiled):
        close(together, alone)


@pytest.mark.parametrize("recipe", ["topk(ratio=0.3)", "local_sgd(2)"])
def test_a_compiled_step_ends_with_equal_models_under_other_recipes(gang2: Gang, recipe: str) -> None:
    (first,), (second,) = gang2.run(ours, compiled, recipe)
    assert same(first, second)
