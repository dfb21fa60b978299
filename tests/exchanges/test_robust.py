"""Robust means: liars, equal messages, neutral settings, messages that are not finite, training, and what is refused."""

import pytest
import torch
from tests.laws.blocks import block
from tests.laws.crew import Crew
from tests.runtime.gym import Flat, bit_equal, make, noise, parameters, pull, resumed, saved, sgd, spoiled, train
from torch import Tensor, nn

from gossamer.core.errors import AttachError, RecipeError
from gossamer.exchanges import Clipped, Median, RobustMean, Trimmed
from gossamer.exchanges.robust import robust_mean
from gossamer.recipe import Recipe


def honest(count: int) -> list[Tensor]:
    return [noise(rank, numel=50) for rank in range(count)]


@pytest.mark.parametrize(("mean", "liars", "ranks"), [(Median(), 2, 5), (Trimmed(2), 2, 5), (Trimmed(1), 1, 4)])
@pytest.mark.parametrize("lie", [1e9, -1e9])
def test_liars_do_not_leave_the_range_of_the_honest(mean: RobustMean, liars: int, ranks: int, lie: float) -> None:
    fair = honest(ranks - liars)
    found = robust_mean(mean, [*fair, *[torch.full((50,), lie)] * liars], {})
    assert (found <= torch.stack(fair).amax(0)).all()
    assert (found >= torch.stack(fair).amin(0)).all()


def test_a_clipped_liar_moves_the_result_by_its_share_of_tau() -> None:
    state, fair = dict[str, Tensor](), honest(4)
    found = robust_mean(Clipped(0.5), [*fair, torch.full((50,), 1e9)], state)
    others = robust_mean(Clipped(0.5), [*fair, torch.zeros(50)], {})
    assert float((found - others).norm()) <= 0.5 / 5 + 1e-6
    assert torch.equal(state["centre"], found)


def test_a_length_to_clip_at_is_without_the_loss_scale() -> None:
    plain, scaled = (Crew("gather(fp32(), mean=clipped(0.5))", 3) for _ in range(2))
    for step, scale in enumerate([1.0, 2.0**10, 2.0**5, 2.0**16]):
        blocks = [block("long", seed=3 * step + rank) for rank in range(3)]
        expected = plain.step([b.like(b.flat.clone()) for b in blocks])
        assert torch.equal(scaled.step([b.like(b.flat * scale) for b in blocks], scale=scale) / scale, expected)


@pytest.mark.parametrize("mean", [Median(), Trimmed(1), Trimmed(3)])
@pytest.mark.parametrize("ranks", [7, 8])
def test_equal_messages_are_returned_exactly(mean: RobustMean, ranks: int) -> None:
    (x,) = honest(1)
    assert torch.equal(robust_mean(mean, [x] * ranks, {}), x)


@pytest.mark.parametrize(("count", "ranks"), [(1, 1), (1, 2), (2, 3), (2, 4)])
def test_where_ranks_were_lost_trimming_leaves_the_middle(count: int, ranks: int) -> None:
    """Fewer ranks than a recipe needs are refused at the start, and may be left of those that it started with."""
    rows = honest(ranks)
    assert torch.equal(robust_mean(Trimmed(count), rows, {}), robust_mean(Median(), rows, {}))


def test_neutral_means_are_the_plain_one() -> None:
    recipes = "gather(fp32())", "gather(fp32(), mean=trimmed(0))", "gather(fp32(), mean=clipped(1e30))"
    plain, untrimmed, unclipped = (make(recipe, 3) for recipe in recipes)
    for ranks in (plain, untrimmed, unclipped):
        train(ranks, pull, 5)
    assert bit_equal([*parameters(plain), *parameters(untrimmed)])
    torch.testing.assert_close(parameters(unclipped)[0], parameters(plain)[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("mean", ["median()", "trimmed(1)", "clipped(1e3)"])
def test_a_rank_that_sends_anything_is_borne_and_replicas_stay_equal(mean: str) -> None:
    def backward(model: nn.Module, rank: int, step: int) -> float:
        x = model.get_parameter("x")
        x.grad = x.detach() - 1.0 if rank else torch.full_like(x, 1e3 if "clipped" in mean else 1e9)
        return 0.0

    ranks = make(f"gather(fp32(), mean={mean})", 5, Flat, sgd(0.1, 0.0))
    train(ranks, backward, 60)
    assert bit_equal(parameters(ranks))
    if "clipped" not in mean:
        torch.testing.assert_close(parameters(ranks)[0], torch.ones(5, dtype=torch.float64), rtol=0, atol=0.01)
    plain = make("gather(fp32())", 5, Flat, sgd(0.1, 0.0))
    train(plain, backward, 60)
    assert (parameters(plain)[0] - 1).abs().max() > (parameters(ranks)[0] - 1).abs().max()


def test_a_message_that_is_not_finite_is_left_out() -> None:
    rows = honest(4)
    spoilt = [*rows[:3], torch.full((50,), torch.nan)]
    assert torch.equal(robust_mean(Median(), spoilt, {}), robust_mean(Median(), rows[:3], {}))
    assert robust_mean(Trimmed(1), [*rows[:2], *spoilt[3:] * 2], {}).isnan().all()
    ranks = make("gather(fp32(), mean=median())", 4)
    before = parameters(ranks)[0]
    train(ranks, spoiled([(1, 1)], torch.nan), 1)
    assert bit_equal(parameters(ranks))
    assert parameters(ranks)[0].isfinite().all()
    assert not torch.equal(before, parameters(ranks)[0])


def test_resuming_changes_no_bit() -> None:
    recipe = "gather(fp32(), mean=clipped(0.5, times=2))"
    whole, ranks = make(recipe, 3), make(recipe, 3)
    train(whole, pull, 8)
    train(ranks, pull, 3)
    again = resumed(recipe, saved(ranks))
    train(again, pull, 5)
    assert all(bit_equal(pair) for pair in zip(parameters(whole), parameters(again), strict=True))


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("gather(topk(), mean=median()) + error_feedback()", "the others count as 0"),
        ("gather(qsgd(), mean=median()) + diana()", "leaves values out that no memory keeps"),
        ("gather(qsgd(), mean=median()) + quorum_rounds(8)", "late ranks send zeros"),
        ("gather(qsgd(), mean=median()) + backup_workers()", "late ranks send zeros"),
        ("gather(qsgd(), mean=trimmed(-1))", "count must be 0 ranks or more, got -1"),
        ("gather(qsgd(), mean=clipped(0.0))", "tau must be positive, got 0.0"),
        ("gather(qsgd(), mean=clipped(1.0, times=0))", "times must be at least 1, got 0"),
    ],
)
def test_what_cannot_work_is_refused_when_the_recipe_is_made(recipe: str, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        Recipe.of(recipe)


@pytest.mark.parametrize(("mean", "size", "least"), [("median()", 2, 3), ("trimmed(2)", 4, 5), ("clipped(1.0)", 2, 3)])
def test_too_few_ranks_are_refused(mean: str, size: int, least: int) -> None:
    with pytest.raises(AttachError, match=rf"on {size} ranks: .* needs at least {least}"):
        make(f"gather(fp32(), mean={mean})", size)
    make(f"gather(fp32(), mean={mean})", 1)
