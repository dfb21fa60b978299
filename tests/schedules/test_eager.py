"""Eager updates: a rank's own part at once, that of the others a round later."""

import pytest
import torch
from tests.runtime.gym import Flat, anchors, bit_equal, make, parameters, pull, train
from tests.schedules.rates import NUMEL, constant, gradient, known_sgd, scheduled
from torch import Tensor, nn

from gossamer.core.errors import RecipeError
from gossamer.schedules import Eager

DENSE = "allreduce(fp32()) + "


class Outer:
    """torch's Nesterov SGD as an outer step."""

    def __init__(self, start: Tensor) -> None:
        self.at = nn.Parameter(start.clone())
        self.sgd = torch.optim.SGD([self.at], lr=0.4, momentum=0.6, nesterov=True)

    def step(self, way: Tensor) -> Tensor:
        self.at.grad = way
        self.sgd.step()
        return self.at.detach().clone()


@pytest.mark.parametrize("replace", ["own", "scaled"])
def test_it_is_its_formula_and_the_agreed_model_follows_the_means_alone(replace: str) -> None:
    ranks = make(DENSE + f"eager(3, 0.4, 0.6, '{replace}')", 3, lambda: Flat(NUMEL), known_sgd())
    start = Flat(NUMEL).x.detach().clone()
    anchor, models, agreed = [start] * 3, [start] * 3, start
    outers, common, last = [Outer(start) for _ in range(3)], Outer(start), list[Tensor]()
    for round in range(5):
        for step in range(3 * round + 1, 3 * round + 4):
            models = [x - 0.1 * gradient(x, i, step) for i, x in enumerate(models)]
        ways = [a - x for a, x in zip(anchor, models, strict=True)]
        eager = [way / 3 for way in ways]
        if last:
            mean = torch.stack(last).mean(0)
            late = [mean - own / 3 if replace == "own" else mean * 2 / 3 for own in last]
            eager = [e + rest for e, rest in zip(eager, late, strict=True)]
            agreed = common.step(mean)
        anchor = models = [o.step(e) for o, e in zip(outers, eager, strict=True)]
        last = ways
        train(ranks, scheduled(constant), 3)
        for r, x in zip(ranks, models, strict=True):
            torch.testing.assert_close(r.flat(), x, rtol=0, atol=1e-13)
            (share,) = r.worker.recipe.schedule.consensus_share(r.worker.loop) or []
            torch.testing.assert_close(share.value, agreed, rtol=0, atol=1e-13)


def test_nobody_counts_twice_so_ranks_stay_together_and_what_is_printed_drives_them_apart() -> None:
    """Under gradients that do not look at the model: in the end ranks differ by what one round makes, or by all of them."""

    def blind(x: Tensor, rank: int, step: int) -> Tensor:
        return torch.full_like(x, float(rank))

    apart = list[list[float]]()
    for replace in ("own", "scaled"):
        ranks = make(DENSE + f"eager(2, momentum=0.0, replace='{replace}')", 3, lambda: Flat(NUMEL), known_sgd())
        apart.append([])
        for _ in range(3):
            train(ranks, scheduled(constant, blind), 8)
            models = torch.stack(parameters(ranks))
            apart[-1].append(float((models - models.mean(0)).abs().max()))
    own, scaled = apart
    assert own[2] == pytest.approx(own[0], rel=1e-6)
    assert scaled[2] == pytest.approx(3 * scaled[0], rel=1e-6)


def test_a_lost_model_sends_all_ranks_to_the_agreed_one() -> None:
    def lose(m: nn.Module, rank: int, step: int) -> float:
        loss = pull(m, rank, step)
        if (rank, step) == (1, 7):
            m.get_parameter("matrix").data.fill_(float("inf"))
        return loss

    ranks = make("scatter(qsgd(bits=4, bucket=16)) + eager(3)", 3)
    train(ranks, lose, 12)
    assert bit_equal(parameters(ranks))
    assert all(p.isfinite().all() for p in parameters(ranks))
    train(ranks, pull, 12)
    assert not bit_equal([anchors(r) for r in ranks])
    assert all(p.isfinite().all() for p in parameters(ranks))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [((0,), "at least 1 step"), ((3, 0.0), "freeze"), ((3, 0.4, 1.0), r"\[0, 1\)")],
)
def test_what_cannot_be_right_is_refused_with_the_fix(arguments: tuple[float, ...], reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        Eager(*arguments)  # pyright: ignore
