"""Weight decay beside momentum that the recipe keeps: training ends in the optimum of the objective with the decay in it."""

from collections.abc import Callable

import pytest
import torch
from tests.gang import Gang
from tests.runtime.gym import make, parameters, train
from torch import Tensor, nn

import gossamer
from gossamer.core.errors import AttachError

TARGETS = 1.0, 3.0  # of the two ranks: f_i(x) = |x - t_i|^2 / 2
DECAY = 0.5
OPTIMUM = 2 / (1 + DECAY)


class Two(nn.Module):
    """A matrix and a vector, which most recipes send in ways of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6))
        self.vector = nn.Parameter(torch.linspace(0, 2, 7, dtype=torch.float64))


def towards(model: nn.Module, rank: int, step: int) -> float:
    for p in model.parameters():
        p.grad = p.detach() - TARGETS[rank]
    return 0.0


def plain(lr: float = 0.05, decay: float = DECAY) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr, weight_decay=decay)


@pytest.mark.parametrize(
    "recipe",
    [
        "allreduce(fp32()) + momentum_correction(0.9, masking=False)",
        "gather(topk(0.5)) + momentum_correction(0.9)",
        "gather(topk(0.5)) + momentum_correction(0.9) + delayed()",
        "gather(topk(0.5)) + momentum_correction(0.9) + resync(5)",
        "dgc(0.5, momentum=0.9)",
        "dgc(0.5, momentum=0.9, clip=1000.0)",
        "sketched_sgd(0.1, momentum=0.9)",
        "allreduce(fp32()) + diana(momentum=0.9)",
        "scatter(qsgd(bits=4)) + diana(momentum=0.9)",
        "scatter(qsgd(bits=8)) + diana(momentum=0.5) + delayed()",
    ],
)
def test_training_ends_in_the_optimum_with_the_decay_in_it(recipe: str) -> None:
    """On average over steps and elements: those that wait for their turn go to and fro around it, with decay or without."""
    ranks, means = make(recipe, 2, Two, plain()), list[float]()

    def remembering(model: nn.Module, rank: int, step: int) -> float:
        means.append(sum(float(p.detach().sum()) for p in model.parameters()) / 37)
        return towards(model, rank, step)

    train(ranks, remembering, 260)
    assert sum(means[-120:]) / 120 == pytest.approx(OPTIMUM, abs=2e-3)


class Heavy(nn.Module):
    """A matrix of which few elements move: a sketch finds those."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(40, 10, dtype=torch.float64))


def few_towards(*targets: float) -> Callable[[nn.Module, int, int], float]:
    def backward(model: nn.Module, rank: int, step: int) -> float:
        x = model.get_parameter("x")
        x.grad = x.detach().clone()
        x.grad[::13, 3] -= targets[rank]
        return 0.0

    return backward


@pytest.mark.parametrize("schedule", ["", " + backup_workers(backups=0)", " + accelerated(stages=(40,))"])
def test_so_it_is_where_an_exchange_has_the_momentum(schedule: str) -> None:
    ranks = make(f"fetch_sgd(0.02, momentum=0.9){schedule}", 2, Heavy, plain())
    train(ranks, few_towards(*TARGETS), 200)
    for r in ranks:
        moved = r.model.get_parameter("x").detach()[::13, 3]
        torch.testing.assert_close(moved, torch.full_like(moved, OPTIMUM), rtol=0, atol=2e-3)


def test_so_it_is_where_nodes_exchange_with_momentum() -> None:
    ranks = make("nodes(fetch_sgd(0.02, momentum=0.9), 2)", 4, Heavy, plain())
    train(ranks, few_towards(*TARGETS, *TARGETS), 200)
    for r in ranks:
        moved = r.model.get_parameter("x").detach()[::13, 3]
        torch.testing.assert_close(moved, torch.full_like(moved, OPTIMUM), rtol=0, atol=2e-3)


def test_a_rank_that_is_late_decays_what_the_others_decay() -> None:
    ranks = make("fetch_sgd(0.02, momentum=0.9) + backup_workers(backups=1)", 3, Heavy, plain())
    train(ranks, few_towards(2.0, 2.0, 2.0), 200, seconds=lambda rank, step: 1.0 + 2.7 * (rank == 2))
    assert len(ranks[2].losses) < 120  # it was late for most steps
    for r in ranks:
        moved = r.model.get_parameter("x").detach()[::13, 3]
        torch.testing.assert_close(moved, torch.full_like(moved, OPTIMUM), rtol=0, atol=2e-3)
        assert torch.equal(r.flat(), ranks[0].flat())


def by_groups(momentum: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Two groups, of two rates and two decays."""

    def build(model: nn.Module) -> torch.optim.Optimizer:
        assert isinstance(model, Two)
        groups = [
            {"params": [model.matrix], "weight_decay": 0.5, "lr": 0.02},
            {"params": [model.vector], "weight_decay": 2.0},
        ]
        return torch.optim.SGD(groups, lr=0.05, momentum=momentum)

    return build


def cut(recipe: str, momentum: float) -> list[Tensor]:
    """Parameters after 30 steps, ten times smaller rates, and 30 more."""
    ranks = make(recipe, 2, Two, by_groups(momentum))
    train(ranks, towards, 30)
    for r in ranks:
        for group in r.optimizer.param_groups:
            group["lr"] /= 10
    train(ranks, towards, 30)
    return parameters(ranks)


@pytest.mark.parametrize("memory", ["momentum_correction(0.9, masking=False)", "diana(momentum=0.9)"])
def test_it_is_the_decay_of_an_optimizer_that_has_the_momentum_itself(memory: str) -> None:
    """Step by step, in every group and through a change of the learning rate."""
    there, here = cut("allreduce(fp32())", 0.9), cut(f"allreduce(fp32()) + {memory}", 0.0)
    torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-12)


def test_one_group_may_hold_parameters_that_go_with_momentum_and_without() -> None:
    """The vector goes past the memory, and is decayed as ever."""
    recipe = "allreduce(fp32()) + momentum_correction(0.9, masking=False) + rule('ndim < 2', allreduce(fp32()), none())"
    here, plainly = make(recipe, 2, Two, plain()), make("allreduce(fp32())", 2, Two, plain())
    train(here, towards, 40)
    train(plainly, towards, 40)
    assert torch.equal(here[0].model.get_parameter("vector"), plainly[0].model.get_parameter("vector"))
    assert not torch.equal(here[0].model.get_parameter("matrix"), plainly[0].model.get_parameter("matrix"))


def test_a_loss_scale_does_not_reach_it() -> None:
    """Gradients come 1024 times as long, and the optimizer gets them divided by that: every bit is as without."""
    scale, recipe = 2.0**10, "gather(topk(0.5)) + momentum_correction(0.9)"

    def scaled(model: nn.Module, rank: int, step: int) -> float:
        for p in model.parameters():
            p.grad = (p.detach() - TARGETS[rank]) * scale
        return 0.0

    def unscale(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad = p.grad / scale

    there, here = make(recipe, 2, Two, plain()), make(recipe, 2, Two, plain())
    train(there, towards, 40)
    for r in here:
        r.worker.scale = scale
        r.optimizer.register_step_pre_hook(unscale)
    train(here, scaled, 40)
    assert torch.equal(here[0].flat(), there[0].flat())


def adaptive(kind: type[torch.optim.Optimizer], decay: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: kind(model.parameters(), lr=0.05, betas=(0.0, 0.99), weight_decay=decay)  # type: ignore[call-arg]  # pyright: ignore


def test_adam_s_decay_is_in_what_it_divides() -> None:
    """Under Adam the decay is a part of the gradient, and weighs against it as it does without momentum."""
    ranks = make(
        "allreduce(fp32()) + momentum_correction(0.9, masking=False)", 2, Two, adaptive(torch.optim.Adam, DECAY)
    )
    train(ranks, towards, 200)
    for r in ranks:
        for group in r.optimizer.param_groups:
            group["lr"] = 1e-3
    train(ranks, towards, 100)
    torch.testing.assert_close(ranks[0].flat(), torch.full((37,), OPTIMUM, dtype=torch.float64), rtol=0, atol=0.02)


def test_decay_beside_the_gradient_is_left_to_the_optimizer() -> None:
    """AdamW shrinks parameters by lr times the decay at every step, whatever the gradient is; so it does here."""
    recipe = "allreduce(fp32()) + momentum_correction(0.9, masking=False)"
    decayed, never = (make(recipe, 2, Two, adaptive(torch.optim.AdamW, d)) for d in (DECAY, 0.0))
    for ranks in decayed, never:
        train(ranks, towards, 1)
    start = Two()
    before = torch.cat([p.detach().view(-1) for p in start.parameters()])
    torch.testing.assert_close(never[0].flat() - decayed[0].flat(), before * 0.05 * DECAY, rtol=1e-9, atol=1e-12)


def test_gradients_that_are_climbed_are_decayed_the_right_way() -> None:
    def away(model: nn.Module, rank: int, step: int) -> float:
        towards(model, rank, step)
        for p in model.parameters():
            p.grad = -p.grad  # type: ignore[operator]  # pyright: ignore
        return 0.0

    def climbing(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=DECAY, maximize=True)

    ranks = make("allreduce(fp32()) + diana(momentum=0.9)", 2, Two, climbing)
    train(ranks, away, 250)
    torch.testing.assert_close(ranks[0].flat(), torch.full((37,), OPTIMUM, dtype=torch.float64), rtol=0, atol=1e-4)


def test_signs_leave_it_outside() -> None:
    """x -= lr (sign(v) + decay x): the paper's, and no step there is as long as momentum would make it."""
    recipe = "allreduce(fp32()) + diana(momentum=0.9) + signs()"
    decayed, never = (make(recipe, 2, Two, plain(0.05, d)) for d in (DECAY, 0.0))
    for ranks in decayed, never:
        train(ranks, towards, 1)
    before = torch.cat([p.detach().view(-1) for p in Two().parameters()])
    torch.testing.assert_close(never[0].flat() - decayed[0].flat(), before * 0.05 * DECAY, rtol=1e-9, atol=1e-12)


class Stranger(torch.optim.Optimizer):
    """Nobody knows what its decay does."""

    def __init__(self, params, weight_decay: float) -> None:
        super().__init__(params, {"lr": 0.1, "weight_decay": weight_decay})

    def step(self, closure=None):
        return None


def test_an_optimizer_whose_decay_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(AttachError, match=r"diana\(momentum=0.9\).* Stranger.*weight_decay=0"):
        make("allreduce(fp32()) + diana(momentum=0.9)", 2, Two, lambda m: Stranger(m.parameters(), 0.1))
    make("allreduce(fp32()) + diana(momentum=0.9)", 2, Two, lambda m: Stranger(m.parameters(), 0.0))
    make("allreduce(fp32()) + diana()", 2, Two, lambda m: Stranger(m.parameters(), 0.1))


def _loop(rank: int, size: int, recipe: str) -> Tensor:
    model = Two().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=DECAY)
    comm = gossamer.attach(model, optimizer, recipe, deadline=20.0)
    for _ in range(150):
        optimizer.zero_grad()
        sum((p - TARGETS[rank]).square().sum() / 2 for p in model.parameters()).backward()  # type: ignore[union-attr]  # pyright: ignore
        optimizer.step()
    comm.check_sync()
    comm.detach()
    return torch.cat([p.detach().view(-1) for p in model.parameters()])


@pytest.mark.gang
def test_under_attach(gang2: Gang) -> None:
    for found in gang2.run(_loop, "dgc(0.5, momentum=0.9)"):
        assert float(found.mean()) == pytest.approx(OPTIMUM, abs=5e-3)
