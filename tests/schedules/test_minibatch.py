"""Minibatch, accelerated and inner-outer SGD: the self-tests T5.1 to T5.5 of the method notes, and the stages of restarts."""

import runpy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.runtime.gym import Flat, bit_equal, make, parameters, sgd, train
from torch import Tensor, nn

from gossamer.checkpoints import state
from gossamer.core.errors import AttachError, RecipeError
from gossamer.runtime import Worker
from gossamer.schedules import Accelerated, InnerOuter, stages
from gossamer.simulate import Replica

RANKS, DIMENSIONS = 4, 50
Gradient = Callable[[Tensor, int, int], Tensor]


def problem(zeta: float, h: float = 0.9, noise: float = 0.0) -> Gradient:
    """F_m(x) = x' L (I + h D_m) x / 2 + zeta s_m' x: the mean over machines knows neither zeta nor h."""
    rng = torch.Generator().manual_seed(5)
    unlike = torch.randn(RANKS, DIMENSIONS, generator=rng, dtype=torch.float64)
    unlike -= unlike.mean(0)
    unlike /= unlike.square().sum(1).mean().sqrt()
    curved = torch.rand(RANKS, DIMENSIONS, generator=rng, dtype=torch.float64) * 2 - 1
    curved -= curved.mean(0)
    curved /= curved.abs().max()
    spectrum = torch.arange(1, DIMENSIONS + 1, dtype=torch.float64) ** -2
    drawn = dict[int, torch.Generator]()

    def gradient(x: Tensor, rank: int, step: int) -> Tensor:
        rng = drawn.setdefault(rank, torch.Generator().manual_seed(rank))
        blur = torch.randn(DIMENSIONS, generator=rng, dtype=torch.float64) * noise / DIMENSIONS**0.5
        return spectrum * (1 + h * curved[rank]) * x + zeta * unlike[rank] + blur

    return gradient


def worth(x: Tensor) -> float:
    return float((torch.arange(1, DIMENSIONS + 1, dtype=torch.float64) ** -2 * x * x).sum() / 2)


class Start(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(2 * torch.arange(1, DIMENSIONS + 1, dtype=torch.float64) ** -0.5)


def run(recipe: str, lr: float, steps: int, gradient: Gradient, size: int = RANKS) -> list[Replica]:
    def backward(model: nn.Module, rank: int, step: int) -> float:
        x = model.get_parameter("x")
        x.grad = gradient(x.detach(), rank, step)
        return 0.0

    ranks = make(recipe, size, Start, sgd(lr, 0.0))
    train(ranks, backward, steps)
    return ranks


def judged(worker: Worker) -> Tensor:
    shares = worker.recipe.schedule.consensus_share(worker.loop)
    return worker.loop.parameters()[0] if shares is None else shares[0].value


@pytest.mark.parametrize("recipe", ["minibatch(4)", "accelerated(4)"])
def test_at_one_point_it_does_not_matter_how_unlike_the_ranks_are(recipe: str) -> None:
    """T5.1: not in the last bits, for the sum of what is unlike is zero up to rounding only."""
    alike, unlike = (judged(run(recipe, 0.4, 12, problem(zeta, noise=1.0))[0].worker) for zeta in (0.0, 100.0))
    torch.testing.assert_close(alike, unlike, rtol=1e-10, atol=1e-12)


def test_an_inner_rate_of_zero_is_minibatch_sgd() -> None:
    """T5.2, in steps of the batch of a whole round."""
    outer = run("inner_outer(4, inner=0.0)", 0.05, 12, problem(3.0, noise=1.0))
    together = run("minibatch(4)", 0.2, 3, problem(3.0, noise=1.0))
    torch.testing.assert_close(outer[0].flat(), together[0].flat(), rtol=1e-12, atol=1e-14)


def test_an_inner_rate_of_one_is_local_sgd_bit_for_bit() -> None:
    for every in (1, 3):
        pair = [
            run(r, 0.1, 7, problem(3.0, noise=1.0)) for r in (f"inner_outer({every}, inner=1.0)", f"local_sgd({every})")
        ]
        assert all(bit_equal(flat) for flat in zip(*map(parameters, pair), strict=True))


def test_the_steps_of_a_round_are_kept_when_the_number_of_ranks_changes_in_its_midst() -> None:
    def steady(model: nn.Module, rank: int, step: int) -> float:
        x = model.get_parameter("x")
        x.grad = torch.full_like(x, 0.1)
        return 0.0

    recipe = "allreduce + inner_outer(4, inner=0.5)"
    three, two = (make(recipe, size, Flat, sgd(1.0, 0.0)) for size in (3, 2))
    train(three, steady, 2)
    saved = [state.save(r.worker) for r in three]
    for r in two:
        r.model.load_state_dict(three[0].model.state_dict())
        state.load(r.worker, saved)
    for ranks in (two, three):
        train(ranks, steady, 2)
    torch.testing.assert_close(parameters(two)[0], parameters(three)[0])


def test_with_one_gradient_a_round_all_are_synchronous_sgd() -> None:
    """T5.3; accelerated is so in stages of one round each."""
    plain = run("allreduce", 0.1, 6, problem(3.0, noise=1.0))[0].flat()
    one = "allreduce(fp32()) + accelerated(stages=(1,))"
    for recipe in ("minibatch(1)", "local_sgd(1)", "inner_outer(1, inner=0.3)", one):
        torch.testing.assert_close(
            run(recipe, 0.1, 6, problem(3.0, noise=1.0))[0].flat(), plain, rtol=1e-12, atol=1e-14
        )


def test_accelerated_gains_a_power_of_the_rounds() -> None:
    """T5.4: on lambda_i = i^-2, d = 400, F R^2 stays where F R does without acceleration."""
    scales = torch.arange(1, 401, dtype=torch.float64) ** -2

    def long() -> nn.Module:
        model = Flat(400)
        model.x.data = scales**0.25
        return model

    def backward(model: nn.Module, rank: int, step: int) -> float:
        x = model.get_parameter("x")
        x.grad = scales * x.detach()
        return 0.0

    def values(recipe: str, lr: float) -> list[float]:
        ranks, out, done = make(recipe, 1, long, sgd(lr, 0.0)), list[float](), 0
        for rounds in (10, 80, 320):
            train(ranks, backward, rounds - done)
            done = rounds
            out.append(float((scales * judged(ranks[0].worker) ** 2).sum() / 2))
        return out

    fast, slow = values("accelerated(1)", 0.5), values("allreduce", 1.0)
    assert all(1.1 < f * r * r < 1.8 for f, r in zip(fast, (10, 80, 320)))
    assert all(0.118 < f * r < 0.125 for f, r in zip(slow, (10, 80, 320)))


@pytest.mark.slow
def test_the_order_of_the_table_at_its_ends() -> None:
    """T5.5: alike ranks make local steps pay; unlike ones make them lose to a minibatch. Rates are near the best of each."""

    def final(recipe: str, rates: tuple[float, ...], steps: int, zeta: float) -> float:
        return min(worth(judged(run(recipe, lr, steps, problem(zeta, noise=1.0))[0].worker)) for lr in rates)

    alike, unlike = (final("local_sgd(50)", (0.5, 0.004), 1000, zeta) for zeta in (0.0, 30.0))
    minibatch, fast = final("minibatch(50)", (1.0,), 20, 0.0), final("accelerated(50)", (0.5,), 20, 0.0)
    assert max(alike, fast) < minibatch < unlike


def test_unlike_gradients_alone_do_no_harm_to_quadratics() -> None:
    """The edge: with equal Hessians the drift of local steps averages to nothing."""
    alike, unlike = (run("local_sgd(5)", 0.3, 20, problem(zeta, h=0.0))[0].flat() for zeta in (0.0, 30.0))
    torch.testing.assert_close(alike, unlike, rtol=1e-10, atol=1e-12)


def test_every_stage_halves_the_squared_distance() -> None:
    """Noise-free, strongly convex: L = 1, mu = .02; and with noise the stages grow as its share does."""
    scales = torch.linspace(0.02, 1.0, DIMENSIONS, dtype=torch.float64)
    plan = stages(smoothness=1.0, convexity=0.02, distance=float(Start().x.detach().norm()), count=3)
    assert len({stage.rounds for stage in plan}) == 1
    recipe = f"allreduce(fp32()) + accelerated(stages={tuple(s.rounds for s in plan)})"
    distances = [float(Start().x.detach().norm())]
    for count in (1, 2, 3):
        steps = sum(stage.rounds for stage in plan[:count])
        ranks = run(recipe, plan[0].lr, steps, lambda x, rank, step: scales * x, size=2)
        distances.append(float(judged(ranks[0].worker).norm()))
    assert all(after**2 <= before**2 / 2 for before, after in pairwise(distances))
    noisy = stages(smoothness=1.0, convexity=0.02, distance=3.0, noise=0.1, count=4)
    assert noisy[0].lr > noisy[-1].lr
    assert noisy[0].rounds < noisy[-1].rounds


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: Accelerated(0), "micro_batches must be at least 1"),
        (lambda: Accelerated(stages=(4, 0)), "at least 1 round"),
        (lambda: InnerOuter(0), "at least 1 step"),
        (lambda: InnerOuter(4, inner=1.5), r"inner must lie in \[0, 1\]"),
        (lambda: stages(1.0, 2.0, 1.0), "convexity must be at most smoothness"),
        (lambda: stages(1.0, 0.0, 1.0), "convexity must be positive"),
        (lambda: make("topk + accelerated()", 2), "what a memory sends later would get too much weight"),
        (lambda: make("allreduce + signs() + accelerated()", 2), "leave the update out"),
    ],
)
def test_what_cannot_be_is_refused(made: Callable[[], object], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        made()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


@pytest.mark.parametrize("optimizer", [sgd(0.1, 0.9), adam])
def test_accelerated_takes_plain_sgd(optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    with pytest.raises(AttachError, match="momentum=0"):
        make("accelerated", 2, optimizer=optimizer)


def test_the_example_runs_and_its_minibatches_know_no_zeta() -> None:
    table = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "heterogeneity.py"))["rows"](2, 2, True)
    for name in ("minibatch", "accelerated"):
        assert table[name] == pytest.approx([table[name][0]] * 6, rel=1e-9)
    pairs = zip(table["inner and outer"], table["local SGD"], table["minibatch"], strict=True)
    assert all(both <= local and both <= (1 + 1e-9) * minibatch for both, local, minibatch in pairs)
