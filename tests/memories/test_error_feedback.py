"""Error feedback's own tests: units, rates, and training that arrives."""

import pytest
import torch
from tests.laws.blocks import block, roundtrip
from tests.laws.crew import Crew, mean
from tests.memories.convex import Point, Problem
from tests.runtime.gym import Flat, make, parameters, sgd
from torch import Tensor, nn

from gossamer.codecs import TopK
from gossamer.core.bucket import Bucket
from gossamer.memories import ErrorFeedback
from gossamer.simulate import replicas, train

RATES = [0.1, 0.1, 0.01, 0.01, 0.5, 0.002, 0.1]
TOPK = "gather(topk(ratio=0.1)) + error_feedback(units='{}')"


def gradients(size: int, step: int) -> list[Bucket]:
    return [block("matrices", torch.float64, seed=100 * r + step) for r in range(size)]


def theory(size: int) -> list[Tensor]:
    """EF-SGD as the paper writes it: p = lr g + e, send C(p), e = p - C(p), and step by the mean of C(p)."""
    codec, kept, updates = TopK(0.1), [torch.zeros(()) for _ in range(size)], list[Tensor]()
    for step, lr in enumerate(RATES):
        pending = [b.like(lr * b.flat + e) for b, e in zip(gradients(size, step), kept, strict=True)]
        sent = [roundtrip(codec, p) for p in pending]
        kept = [p.flat - s for p, s in zip(pending, sent, strict=True)]
        updates.append(sum(sent) / size)  # pyright: ignore
    return updates


@pytest.mark.parametrize("size", [1, 2, 4])
def test_in_units_of_the_update_it_is_the_form_of_the_theory(size: int) -> None:
    crew = Crew(TOPK.format("update"), size)
    for step, (lr, update) in enumerate(zip(RATES, theory(size), strict=True)):
        torch.testing.assert_close(lr * crew.step(gradients(size, step), lr=lr), update, rtol=1e-5, atol=1e-8)


def test_in_units_of_the_gradient_it_is_not_once_the_rate_changes() -> None:
    crew = Crew(TOPK.format("gradient"), 2)
    got = [lr * crew.step(gradients(2, k), lr=lr) for k, lr in enumerate(RATES)]
    same = [torch.allclose(a, b, rtol=1e-5, atol=1e-8) for a, b in zip(got, theory(2), strict=True)]
    assert same[:2] == [True, True]
    assert not any(same[2:])


def test_with_one_rate_both_units_are_one() -> None:
    a, b = (Crew(TOPK.format(u), 2) for u in ("update", "gradient"))
    for step in range(5):
        torch.testing.assert_close(a.step(gradients(2, step), lr=0.1), b.step(gradients(2, step), lr=0.1))


@pytest.mark.parametrize("exchange", ["gather(topk(ratio=0.1))", "scatter(topk(ratio=0.1))", "scatter(bf16())"])
def test_updates_and_what_is_kept_add_up_over_any_schedule_of_rates(exchange: str) -> None:
    """What owners owe to the mean follows the rate as the residual does; a rate of zero moves neither."""
    crew, given, got = Crew(f"{exchange} + error_feedback(units='update')", 3), 0.0, 0.0
    for step, lr in enumerate([0.0, *RATES, 0.0, 0.3]):
        got = got + lr * crew.step(gradients(3, step), lr=lr)
        given = given + lr * mean(gradients(3, step))
    torch.testing.assert_close(got + 0.3 * (crew.mean_of("residual") + crew.owed()), given, rtol=1e-9, atol=1e-9)


def test_what_is_kept_keeps_its_weight_when_a_controller_raises_the_schedules_rate() -> None:
    """What was held back at a rate of 1 counted four times when it was sent at a rate of 4."""
    slope = torch.arange(1.0, 6.0, dtype=torch.float64)

    def downhill(model: nn.Module, rank: int, step: int) -> float:
        x = model.get_parameter("x")
        x.grad = slope.clone()
        return 0.0

    recipe = (
        "gather(topk(ratio=0.2)) + error_feedback(units='update') + accordion_batch(4, 2, interval=1, threshold=10.0)"
    )
    ranks = make(recipe, 2, Flat, sgd(0.125, 0.0))
    before = parameters(ranks)[0]
    train(ranks, downhill, 7)  # four steps at the first rate, three at four times that
    owed = sum(r.worker.loop.averages.residuals()[0] for r in ranks) / len(ranks)  # pyright: ignore
    torch.testing.assert_close(before - parameters(ranks)[0] + owed, 0.125 * (4 + 3 * 4) * slope)


@pytest.mark.parametrize(("codec", "grid"), [("bf16", 2.0**-7), ("fp16", 2.0**-10)])
def test_what_an_owner_rounds_off_does_not_add_up_to_a_drift(codec: str, grid: float) -> None:
    """Every rank's gradient is exact in a half, and their mean is not: it would be rounded down at every step."""
    given = [Bucket.of({"x": torch.full((6,), 1 + grid * (r == 2), dtype=torch.float64)}) for r in range(3)]

    def drift(recipe: str) -> float:
        crew, total = Crew(recipe, 3), torch.zeros(6, dtype=torch.float64)
        for _ in range(60):
            total += crew.step(given)
        return float((total / 60 - mean(given)).abs().max())

    assert drift(f"scatter({codec}()) + error_feedback()") < grid / 60
    assert drift(f"scatter({codec}())") == pytest.approx(grid / 3)


def test_a_rate_of_zero_pays_no_debts_and_makes_none() -> None:
    crew = Crew(TOPK.format("update"), 2)
    crew.step(gradients(2, 0), lr=0.1)
    before = [{k: v.clone() for k, v in s.items()} for s in crew.kept]
    assert crew.step(gradients(2, 1), lr=0.0).isfinite().all()
    assert all(torch.equal(a[k], b[k]) for a, b in zip(before, crew.kept, strict=True) for k in a)
    fresh = Crew(TOPK.format("update"), 1)
    fresh.step(gradients(1, 0), lr=0.0)
    assert fresh.kept == [{}]


def test_decay_forgets_a_share_of_what_is_kept() -> None:
    crew = Crew("gather(topk(ratio=0.1))+ error_feedback(decay=0.5)", 1)
    crew.step(gradients(1, 0))
    kept = crew.kept[0]["residual"].clone()
    got = crew.step(gradients(1, 1))
    pending = gradients(1, 1)[0].flat + 0.5 * kept
    torch.testing.assert_close(got + crew.kept[0]["residual"], pending, rtol=1e-9, atol=1e-9)


def test_at_full_share_it_is_plain_averaging_with_nothing_kept() -> None:
    crew = Crew("gather(topk(ratio=1.0)) + error_feedback()", 3)
    for step in range(3):
        blocks = [b.like(b.flat.float()) for b in gradients(3, step)]
        expected = sum((b.flat for b in blocks[1:]), blocks[0].flat) / 3
        assert torch.equal(crew.step(blocks), expected)
        assert all((s["residual"] == 0).all() for s in crew.kept)


def test_everything_is_sent_sooner_or_later() -> None:
    crew, given = Crew("gather(topk(ratio=0.1)) + error_feedback()", 2), gradients(2, 0)
    got = crew.step(given).clone()
    for _ in range(20):
        got += crew.step([b.like(torch.zeros_like(b.flat)) for b in given])
    torch.testing.assert_close(got, mean(given), rtol=1e-6, atol=1e-6)
    assert all((s["residual"].abs() < 1e-6).all() for s in crew.kept)


def test_training_with_feedback_follows_dense_training_and_without_it_does_not() -> None:
    problem = Problem(kappa=20.0, workers=4)
    dense = problem.ranks("allreduce", 0.1)
    problem.train(dense, 300)
    away = dict[str, float]()
    for memory in ("error_feedback()", "none(allow_biased=True)"):
        ranks = problem.ranks(f"gather(topk(ratio=0.1)) + {memory}", 0.1)
        problem.train(ranks, 300)
        away[memory] = float((ranks[0].flat() - dense[0].flat()).norm() / dense[0].flat().norm())
    assert away["error_feedback()"] < 0.15
    assert away["none(allow_biased=True)"] > 2 * away["error_feedback()"]


@pytest.mark.parametrize("units", ["gradient", "update"])
def test_the_worker_tells_it_the_rate_that_is_in_force(units: str) -> None:
    """Rates that change between steps, as a scheduler changes them."""

    def backward(model: nn.Module, rank: int, step: int) -> float:
        assert isinstance(model, Point)
        model.x.grad = torch.randn(
            len(model.x), generator=torch.Generator().manual_seed(7 * step + rank), dtype=torch.float64
        )
        return 0.0

    ranks = replicas(TOPK.format(units), Point, lambda m: torch.optim.SGD(m.parameters(), lr=1.0), 2, seed=1)
    given = torch.zeros(len(ranks[0].flat()), dtype=torch.float64)
    for step, lr in enumerate(RATES, start=1):
        for r in ranks:
            r.optimizer.param_groups[0]["lr"] = lr
        train(ranks, backward, 1)
        for rank in range(2):
            point = Point()
            backward(point, rank, step)
            assert point.x.grad is not None
            given -= lr * point.x.grad / 2
    kept = torch.stack([r.worker.buckets[0].states["memory"]["residual"] for r in ranks]).mean(0)
    conserved = torch.allclose(ranks[0].flat() - RATES[-1] * kept, given, rtol=1e-9, atol=1e-9)
    assert conserved == (units == "update")


def test_it_prints_what_differs_from_the_default() -> None:
    assert repr(ErrorFeedback(decay=0.5)) == "error_feedback(decay=0.5)"
