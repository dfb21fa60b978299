"""`every_step(l1)` ends in the optimum of f + l1 |x|_1, whatever momentum there is; and is refused where it would not."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.gang import Gang
from torch import Tensor, nn
from torch.nn.functional import softshrink

import gossamer
from gossamer.core.errors import AttachError
from gossamer.simulate import replicas, train

SGD: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "plain": torch.optim.SGD,
    "heavy ball": partial(torch.optim.SGD, momentum=0.9),
    "nesterov": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "dampened": partial(torch.optim.SGD, momentum=0.9, dampening=0.5),
}
ROWS, COLUMNS = 40, 20


class Point(nn.Module):
    def __init__(self, numel: int = 1) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(numel, dtype=torch.float64))


def loop(optimizer: Callable[..., torch.optim.Optimizer], recipe: str, target: float = 2.0, steps: int = 300) -> float:
    """A user's loop on 1/2 (x - target)^2."""
    model = Point()
    descent = optimizer(model.parameters(), lr=0.05)
    comm = gossamer.attach(model, descent, recipe)
    for _ in range(steps):
        descent.zero_grad()
        ((model.x - target).square().sum() / 2).backward()
        descent.step()
    comm.detach()
    return float(model.x.detach())


@pytest.mark.parametrize("kind", SGD)
def test_one_number_ends_l1_short_of_its_target(kind: str) -> None:
    """min 1/2 (x - 2)^2 + |x| / 2 is at 1.5; a threshold without momentum's factor ends at 1.95."""
    assert loop(SGD[kind], "allreduce + every_step(l1=0.5)") == pytest.approx(1.5, abs=1e-6)


def test_every_optimizer_has_the_threshold_of_its_own_step_at_a_rate_of_the_schedules() -> None:
    """Only the last optimizer's threshold was multiplied by `rate`, as all steps are: the first ended at 1.75."""
    model = nn.ModuleList([Point(), Point()])
    descents = [torch.optim.SGD(point.parameters(), lr=0.05) for point in model]
    with gossamer.attach(model, descents, "allreduce + every_step(rate=2.0, l1=0.5)"):
        for _ in range(300):
            for descent in descents:
                descent.zero_grad()
            sum((p - 2.0).square().sum() / 2 for p in model.parameters()).backward()  # pyright: ignore
            for descent in descents:
                descent.step()
    for p in model.parameters():
        assert float(p.detach()) == pytest.approx(1.5, abs=1e-6)


def ranks_own(rank: int, size: int, recipe: str, momentum: float) -> float:
    return loop(partial(torch.optim.SGD, momentum=momentum), recipe, target=1.0 + 2 * rank)


@pytest.mark.gang
@pytest.mark.parametrize(("memory", "momentum"), [("", 0.8), (" + diana(momentum=0.5)", 0.0)])
def test_momentum_in_the_optimizer_or_in_the_memory(gang2: Gang, memory: str, momentum: float) -> None:
    """Targets 1 and 3 on two ranks: the mean objective's optimum is 1.5 as well."""
    for x in gang2.run(ranks_own, f"allreduce{memory} + every_step(l1=0.5)", momentum):
        assert x == pytest.approx(1.5, abs=1e-5)


def problem() -> tuple[Tensor, Tensor]:
    """Features and answers of which five columns are the cause."""
    rng = torch.Generator().manual_seed(4)
    a = torch.randn(ROWS, COLUMNS, generator=rng, dtype=torch.float64) / ROWS**0.5
    truth = torch.zeros(COLUMNS, dtype=torch.float64)
    truth[torch.randperm(COLUMNS, generator=rng)[:5]] = torch.tensor([3.0, -2.0, 4.0, -3.0, 0.05]).double()
    return a, a @ truth + 0.01 * torch.randn(ROWS, generator=rng, dtype=torch.float64)


def optimum(l1: float, ridge: float) -> Tensor:
    """Of 1/2 |a x - b|^2 + ridge / 2 |x|^2 + l1 |x|_1, by plain proximal steps."""
    a, b = problem()
    stride = 1 / (float(torch.linalg.matrix_norm(a, 2)) ** 2 + ridge)
    x = torch.zeros(COLUMNS, dtype=torch.float64)
    for _ in range(2_000):
        x = softshrink(x - stride * (a.T @ (a @ x - b) + ridge * x), stride * l1)
    return x


@pytest.mark.parametrize(
    ("kind", "l1", "ridge"),
    [
        *(pytest.param(kind, 0.05, 0.2, marks=[] if kind == "nesterov" else pytest.mark.slow) for kind in SGD),
        *[("nesterov", 0.1, 0.0), ("heavy ball", 0.0, 0.5)],
    ],
)
def test_the_optimum_of_lasso_and_ridge_is_found_with_momentum(kind: str, l1: float, ridge: float) -> None:
    a, b = problem()

    def backward(model: nn.Module, rank: int, step: int) -> float:
        x, mine = model.get_parameter("x"), slice(rank, None, 2)
        x.grad = 2 * a[mine].T @ (a[mine] @ x.detach() - b[mine])
        return 0.0

    def descent(model: nn.Module) -> torch.optim.Optimizer:
        return SGD[kind](model.parameters(), lr=0.05 if kind != "plain" else 0.2, weight_decay=ridge)

    crew = replicas(f"allreduce + every_step(l1={l1})", partial(Point, COLUMNS), descent, 2)
    train(crew, backward, 400)
    wanted, found = optimum(l1, ridge), crew[0].flat()
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    if l1:
        assert torch.equal(found != 0, wanted != 0)
        assert int((wanted != 0).sum()) < COLUMNS


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        torch.optim.LBFGS,
        partial(torch.optim.SGD, momentum=1.0),
    ],
)
def test_optimizers_whose_steps_are_no_multiple_of_the_gradient_are_refused_by_name(optimizer: Any) -> None:
    name = getattr(optimizer, "func", optimizer).__name__
    for recipe in ("allreduce + every_step(l1=0.5)", "diana(l1=0.5)"):
        with pytest.raises(AttachError, match=rf"every_step\(l1=0.5\) with {name}.*use torch.optim.SGD"):
            loop(optimizer, recipe, steps=1)
    if name != "LBFGS":
        loop(optimizer, "allreduce + every_step()", steps=1)


def test_a_rate_of_zero_and_a_skipped_step_shrink_nothing() -> None:
    model = Point()
    nn.init.constant_(model.x, 0.3)
    descent = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    comm = gossamer.attach(model, descent, "allreduce + every_step(l1=0.5)")
    (model.x * 0.0).sum().backward()
    descent.step()
    assert float(model.x.detach()) == 0.3
    comm.detach()
