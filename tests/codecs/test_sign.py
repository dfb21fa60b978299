"""Signs: what their scales say, votes, and what becomes of signs without error feedback."""

from itertools import pairwise

import pytest
import torch
from tests.laws.blocks import agree, context, roundtrip, vector
from tests.runtime.gym import Flat, make, sgd, train
from torch import Tensor, nn

from gossamer.codecs import Sign
from gossamer.core.bucket import Bucket
from gossamer.core.errors import RecipeError
from gossamer.exchanges import Gather, Scatter
from gossamer.recipe import Recipe

VOTES = Scatter(Sign("one"), feedback=0.0, own="encoded")


@pytest.mark.parametrize("name", ["gauss", "laplace", "spike"])
def test_what_signs_leave_follows_from_how_even_the_elements_are(name: str) -> None:
    """Squared error 1 - k^2 of the nearest scale, and 2 (1 - k) of the one that keeps the length, k = |x|_1 / (sqrt(n) |x|_2)."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(100_000, generator=rng, dtype=torch.float64)
    if name == "laplace":
        x = x.sign() * torch.rand(x.shape, generator=rng).clamp(min=1e-12).log().double()
    if name == "spike":
        x = torch.zeros_like(x).index_fill_(0, torch.tensor([7]), 1.0)
    given = vector(x.float())
    k = float(x.abs().sum() / (x.numel() ** 0.5 * x.norm()))
    for scale, left in ("l1", 1 - k**2), ("l2", 2 * (1 - k)):
        through = roundtrip(Sign(scale), given).double()
        assert float((through - x).square().sum() / x.square().sum()) == pytest.approx(left, rel=1e-3)
    assert k == pytest.approx({"gauss": 0.798, "laplace": 0.707, "spike": 0.00316}[name], rel=0.01)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_rank_has_one_vote_in_every_chunk(size: int) -> None:
    """Also in the one that it counts: a thousandfold gradient of one rank outvotes nobody."""
    signs = torch.where(torch.arange(size)[:, None] * 7 + torch.arange(60)[None, :] % 5 < 7 * size // 2, 1.0, -1.0)
    blocks = [vector(s * (1000.0 if r == 0 else 1e-3)) for r, s in enumerate(signs)]
    echoes, _ = agree([VOTES.average(b, {}, context(r, size)) for r, b in enumerate(blocks)])
    tally = signs.sum(0)
    assert torch.equal(echoes[0].mean[tally != 0], tally.sign()[tally != 0])
    assert echoes[0].mean.abs().eq(1).all() or not tally.any()


def test_nothing_and_a_tie_are_tossed() -> None:
    """Of 4000 coins 1850 to 2150 fall on one side (z < 4.8); always the same at one step, others at another."""
    zeros, up, down = torch.zeros(4002), torch.ones(4002), -torch.ones(4002)
    for x in (zeros, down):
        x[0] = x[-1] = 1.0  # a chunk of nothing but ties moves nothing
    for given in ([vector(zeros)] * 2, [vector(up), vector(down)]):
        seen = list[Tensor]()
        for step in (1, 1, 2):
            echoes, _ = agree([VOTES.average(b, {}, context(r, 2, step)) for r, b in enumerate(given)])
            seen.append(echoes[0].mean)
            assert 1850 < int((seen[-1][1:-1] > 0).sum()) < 2150
        assert torch.equal(*seen[:2])
        assert not torch.equal(*seen[1:])


def one_dimension(model: nn.Module, rank: int, step: int) -> float:
    """x / 4 on average: in one batch of four the gradient is 4, in the others -1."""
    x = model.get_parameter("x")
    with torch.no_grad():
        x.clamp_(-1, 1)
    x.grad = torch.full_like(x, 4.0 if step % 4 == 0 else -1.0)
    return 0.0


@pytest.mark.parametrize(("recipe", "end"), [("signsgd", 1.0), ("ef_signsgd", -1.0)])
def test_signs_climb_where_most_batches_say_so_and_error_feedback_descends(recipe: str, end: float) -> None:
    """The counter-example of Karimireddy et al., 2019."""
    ranks = make(recipe, 3, lambda: Flat(1, start=0.0), sgd(0.05, 0.0))
    train(ranks, one_dimension, 120)
    assert float(ranks[0].flat()) == pytest.approx(end, abs=0.25)


@pytest.mark.slow
def test_error_feedback_reaches_the_optimum_of_a_quadratic_and_signs_do_not() -> None:
    """Condition 10 in 30 dimensions, rate .02, 1000 steps."""
    turned = torch.linalg.qr(torch.randn(30, 30, generator=torch.Generator().manual_seed(2), dtype=torch.float64)).Q
    curvature = turned @ torch.linspace(1, 10, 30, dtype=torch.float64).diag() @ turned.T

    def slope(model: nn.Module, rank: int, step: int) -> float:
        x = model.get_parameter("x")
        x.grad = curvature @ x.detach()
        return 0.0

    left = dict[str, float]()
    for recipe in ("ef_signsgd", "signsgd"):
        ranks = make(recipe, 2, lambda: Flat(30), sgd(0.02, 0.0))
        train(ranks, slope, 1000)
        left[recipe] = float(ranks[0].flat().norm())
    assert left["ef_signsgd"] < 1e-6 < 1e-2 < left["signsgd"]


def test_momenta_are_voted_on() -> None:
    """Three quarters of gradients say up, their running mean says down."""
    ranks = make("signsgd(momentum=0.95)", 3, lambda: Flat(1, start=0.0), sgd(0.01, 0.0))
    train(ranks, one_dimension, 120)
    assert float(ranks[0].flat()) < -0.5


def test_a_vote_is_no_mean_and_is_refused_where_one_is_wanted() -> None:
    for exchange in (Gather(Sign("one")), Scatter(Sign("one"))):
        with pytest.raises(RecipeError, match=r"none\(allow_biased=True\)"):
            Recipe(exchange)
    with pytest.raises(RecipeError, match="can diverge"):
        Recipe.of("scatter(sign(scale='one')) + error_feedback()")


def test_two_vectors_have_scales_of_their_own() -> None:
    given = Bucket.of({"a": torch.full((600,), 3.0), "b": torch.full((700,), 1e-3)})
    through = roundtrip(Sign("l2"), given)
    for a, b in pairwise(given.layout.bounds):
        torch.testing.assert_close(through[a:b], given.flat[a:b])
