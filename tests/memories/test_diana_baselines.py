"""DIANA's own quantiser, the theory's step sizes, and the baselines that it is measured against."""

import pytest
import torch
from tests.laws.blocks import context, roundtrip, vector
from tests.memories.convex import DIMENSIONS, Problem
from tests.runtime.gym import bit_equal, make, parameters, pull, train

from gossamer.codecs import QSGD, Bernoulli
from gossamer.core.bucket import Layout
from gossamer.memories.diana import plan
from gossamer.planning import bytes_per_step

QUICK = Problem(kappa=8.0, workers=4)
LONG = Layout.of({"x": (DIMENSIONS,)})


def distance(recipe: str, rate: float, steps: int) -> float:
    return QUICK.train(QUICK.ranks(recipe, rate), steps)


@pytest.mark.parametrize(("norm", "codec"), [("l1", Bernoulli("l1", DIMENSIONS)), ("l2", Bernoulli("l2", DIMENSIONS))])
def test_its_variance_is_the_formula_s(norm: str, codec: Bernoulli) -> None:
    """|x|_1 |x|_p - |x|^2, to 5 %, three times what 4000 draws leave open."""
    x = torch.randn(DIMENSIONS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    draws = torch.stack([roundtrip(codec, vector(x), context(step=s)) for s in range(3000)])
    expected = float(x.norm(1) * x.norm(1 if norm == "l1" else 2) - x.square().sum())
    assert float((draws - x).square().sum(1).mean()) == pytest.approx(expected, rel=0.05)
    kept = float((draws != 0).sum(1).double().mean())
    assert kept == pytest.approx(1.0 if norm == "l1" else float(x.norm(1) / x.norm(2)), rel=0.05)


def test_it_follows_at_the_rate_of_the_theory() -> None:
    """alpha_1 = 1/d, alpha_2 = 1/sqrt(d), alpha_inf = 2 / (1 + sqrt(d)): half of 1 / (1 + omega)."""
    pairs = {"l1": Bernoulli("l1", 40), "l2": QSGD(2, 40, "l2"), "max": QSGD(2, 40)}
    for norm, codec in pairs.items():
        known = plan(9.8, 0.1, 10, 40, norm)  # pyright: ignore
        assert known.alpha == pytest.approx(0.5 / (1 + codec.omega(LONG)), rel=1e-6)
    assert [round(2 * plan(1, 1, 10, 40, n).alpha, 3) for n in ("l1", "l2", "max")] == [0.025, 0.158, 0.273]
    assert [round(plan(1, 1, 10, 40, n).complexity) for n in ("l1", "l2", "max")] == [80, 13, 7]
    alpha, rate = Problem().rates(QSGD(2, 40).omega(LONG))
    assert plan(9.8, 0.1, 10, 40)[:2] == pytest.approx((alpha, rate))


def test_with_one_of_eight_elements_it_reaches_the_optimum_where_the_baselines_stall() -> None:
    alpha, gamma, _ = plan(0.8, 0.1, 4, 8, "l1")
    assert distance(f"gather(bernoulli(bucket=8)) + diana(alpha={alpha})", gamma, 500) < 1e-9
    for start in ("zero", "first"):
        assert distance(f"gather(bernoulli(bucket=8)) + diana(alpha=0.0, start='{start}')", gamma, 120) > 1e-4


def test_dqgd_is_quantisation_alone_bit_for_bit() -> None:
    baseline, plain = make("dqgd", 3), make("gather(qsgd(bits=2))", 3)
    train(baseline, pull, 5)
    train(plain, pull, 5)
    assert bit_equal([*parameters(baseline), *parameters(plain)])


def test_the_first_gradients_travel_in_full_once() -> None:
    ranks, dense = make("dqgd(start='first')", 3), make("allreduce", 3)
    train(ranks, pull, 1)
    train(dense, pull, 1)
    torch.testing.assert_close(parameters(ranks)[0], parameters(dense)[0])
    first = {k: [r.worker.buckets[0].states["memory"][k].clone() for r in ranks] for k in ("own", "common")}
    train(ranks, pull, 3)
    assert bit_equal(parameters(ranks))
    for key, was in first.items():
        assert all(torch.equal(r.worker.buckets[0].states["memory"][key], w) for r, w in zip(ranks, was, strict=True))
    torch.testing.assert_close(torch.stack(first["own"]).mean(0), first["common"][0])


def test_what_is_counted_is_what_comes_after_the_first() -> None:
    shapes = {"w": (300,)}
    assert bytes_per_step("dqgd(start='first')", shapes, 3) == bytes_per_step("dqgd", shapes, 3)
