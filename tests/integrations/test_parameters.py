"""Parameters of every kind: unused, frozen, shared, of other precisions, with sparse gradients."""

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import SMALL, Awkward, attached, data, flat, loss_of, same, small_step
from torch import Tensor, nn

pytestmark = pytest.mark.gang


class Branches(nn.Module):
    """One branch for even ranks, one for odd, one for nobody; a frozen layer; a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(17, 17)
        self.again = nn.Linear(17, 17)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(17, 17).requires_grad_(False)
        self.even, self.odd, self.nobody = nn.Linear(17, 7), nn.Linear(17, 7), nn.Linear(17, 7)
        self.rank = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.frozen(torch.tanh(self.again(torch.tanh(self.first(x)))))
        return self.even(h) if self.rank % 2 == 0 else self.odd(h)


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def branched(rank: int, size: int, recipe: str, find: bool) -> dict[str, Tensor]:
    start = Branches().state_dict()
    with attached(recipe, Branches(), decaying, find_unused_parameters=find) as (model, optimizer, comm):
        for step in range(1, 5):
            model.rank = rank if step != 3 else 0  # at the third step nobody takes the odd branch
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            assert all(p.grad is None for p in model.frozen.parameters())
            optimizer.step()
        comm.check_sync()
        assert model.again.weight is model.first.weight
        return {n: (t - start[n]).abs().max() for n, t in model.state_dict().items()} | {"flat": flat(model)}


@pytest.mark.parametrize("recipe", ["allreduce" + SMALL, "topk(ratio=0.5)" + SMALL, "local_sgd(2)"])
@pytest.mark.parametrize("find", [True, False])
def test_unused_frozen_and_tied_parameters(gang2: Gang, recipe: str, find: bool) -> None:
    a, b = gang2.run(branched, recipe, find)
    assert same(a["flat"], b["flat"])
    assert a["frozen.weight"] == 0
    assert a["even.weight"] > 0
    assert a["odd.weight"] > 0
    local = "local" in recipe  # there an unused parameter has no gradient anyway
    assert (a["nobody.weight"] == 0) == (find or local)


def precise(rank: int, size: int, recipe: str, dtype: torch.dtype) -> tuple[Tensor, float]:
    with attached(recipe, Awkward(dtype)) as (model, optimizer, comm):
        first = seen_by_all(model, size)
        for _ in range(12):
            small_step(model, optimizer, comm, rank)
        assert all(p.dtype == dtype and (p.grad is None or p.grad.dtype == dtype) for p in model.parameters())
        comm.check_sync()
        return flat(model), first - seen_by_all(model, size)


@torch.no_grad()
def seen_by_all(model: nn.Module, size: int) -> float:
    return sum(float(loss_of(model, r, step)) for r in range(size) for step in range(1, 13))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "recipe",
    [
        "allreduce" + SMALL,
        "terngrad",
        "topk(ratio=0.2)" + SMALL,
        "powersgd",
        "slowmo(3, beta=0.1)",
        "qsgd + local_sgd(3)",
        "backup(backups=0)",
    ],
)
def test_other_precisions_train(gang2: Gang, recipe: str, dtype: torch.dtype) -> None:
    (a, gain), (b, _) = gang2.run(precise, recipe, dtype)
    assert torch.equal(a, b)
    assert gain > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("recipe", ["sgp", "osgp", "overlap_local_sgd(3)"])
def test_other_precisions_mix(gang2: Gang, recipe: str, dtype: torch.dtype) -> None:
    for model, gain in gang2.run(precise, recipe, dtype):
        assert model.isfinite().all()
        assert gain > 0


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 6, sparse=sparse)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x).mean(1))


def embedded(rank: int, size: int, sparse: bool, to_none: bool) -> Tensor:
    with attached("allreduce" + SMALL, Words(sparse), lambda m: torch.optim.SGD(m.parameters(), lr=0.1)) as (
        m,
        opt,
        comm,
    ):
        for step in range(4):
            words = torch.randint(50, (4, 5), generator=torch.Generator().manual_seed(10 * step + rank))
            opt.zero_grad(set_to_none=to_none)
            m(words).square().sum().backward()
            opt.step()
        comm.check_sync()
        return flat(m)


def test_sparse_gradients_are_averaged_like_dense_ones(gang2: Gang) -> None:
    dense = gang2.run(embedded, False, True)[0]
    for to_none in (True, False):
        torch.testing.assert_close(gang2.run(embedded, True, to_none)[0], dense)


class Resting(nn.Module):
    """A layer that all ranks use at the first step, and nobody after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.always, self.once = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.always(x) + (self.once(x) if both else 0)


def rested(rank: int, size: int, find: bool) -> tuple[dict[str, Tensor], bool, float]:
    def plain(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    recipe = "gather(topk(ratio=0.1)) + error_feedback() + bucket(0.0001)"
    with attached(recipe, Resting(), plain, find_unused_parameters=find) as (model, optimizer, comm):
        for step in range(1, 13):
            optimizer.zero_grad()
            x = data(rank, step)[0][:, :6]
            model(x, step == 1).square().mean().backward()
            optimizer.step()
        owed = [c.states["memory"]["residual"] for c in comm.worker.buckets if "once" in c.name]
        none_left = model.get_parameter("once.weight").grad is None
        return (
            {n: p.detach().clone() for n, p in model.named_parameters()},
            none_left,
            sum(float(r.norm()) for r in owed),
        )


def test_what_a_memory_owes_to_a_parameter_is_paid_though_nobody_uses_it(gang2: Gang) -> None:
    """It crosses the network in any case; and once all is paid the parameter has no gradient."""
    for (found, gone, owed), (plain, _, _) in zip(gang2.run(rested, True), gang2.run(rested, False), strict=True):
        assert found.keys() == plain.keys()
        assert all(same(found[n], plain[n]) for n in plain)
        assert gone
        assert owed == 0


# -- parameters without a gradient, where the recipe has an update of its own --------------------------------------------------

UPDATES = ["signs()", "signs(momentum=0.9)", "lion()", "onebit_adam_update(2)", "dion_update(2)"]


def decaying_alone(model: nn.Module) -> torch.optim.Optimizer:
    """Without a momentum, which these updates have themselves."""
    return torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=0.1)


def redirected(rank: int, size: int, recipe: str) -> list[dict[str, Tensor]]:
    """The model after each step."""
    out = list[dict[str, Tensor]]()
    with attached(recipe, Resting(), decaying_alone, find_unused_parameters=size > 1) as (model, optimizer, comm):
        for step in range(1, 5):
            optimizer.zero_grad()
            model(data(rank, step)[0][:, :6], step == 1).square().mean().backward()
            optimizer.step()
            out.append({n: p.detach().clone() for n, p in model.named_parameters()})
        comm.check_sync()
    return out


@pytest.mark.parametrize("update", UPDATES)
def test_without_a_gradient_there_is_no_step_of_an_update_either(gang2: Gang, update: str) -> None:
    """Neither by its momentum nor by weight decay, on one rank as on two."""
    for first, *later in (*gang2.run(redirected, f"allreduce + {update}"), redirected(0, 1, f"allreduce + {update}")):
        for each in later:
            assert all(same(each[n], first[n]) == n.startswith("once") for n in first)


def used_early(rank: int, size: int) -> list[float]:
    """How far each step moves a layer that only the first of two micro-batches uses."""
    out = list[float]()
    with attached("allreduce + lion()", Resting(), decaying_alone, find_unused_parameters=True) as (
        model,
        optimizer,
        comm,
    ):
        for step in (1, 2, 3):
            before = model.get_parameter("once.weight").detach().clone()
            optimizer.zero_grad()
            with comm.no_sync():
                model(data(rank, step)[0][:, :6], True).square().mean().backward()
            model(data(rank, step)[0][:, :6], False).square().mean().backward()
            optimizer.step()
            out.append(float((model.get_parameter("once.weight").detach() - before).abs().max()))
    return out


def test_a_layer_that_only_an_earlier_micro_batch_used_takes_its_step(gang2: Gang) -> None:
    assert all(far > 0 for moved in gang2.run(used_early) for far in moved)
