"""Sharded slow state, self-test T3.8: where the anchor and the momentum lie changes no bit of what is trained."""

from typing import Any

import pytest
import torch
from tests.runtime.fleet import SMALL
from tests.runtime.gym import bit_equal, contents, held, make, parameters, pull, resumed, train
from torch import Tensor

from gossamer.checkpoints import state as checkpoint
from gossamer.core.errors import AttachError, CheckpointError, RecipeError
from gossamer.planning import bytes_per_step
from gossamer.recipe import Recipe

DENSE = "scatter(fp32()) + "
SHARDED = DENSE + "slowmo(3, sharded=True)"


def trajectory(recipe: str, size: int, steps: int, backward: Any = pull) -> list[Tensor]:
    """Every rank's parameters after each step."""
    ranks, out = make(recipe, size), list[Tensor]()
    for _ in range(steps):
        train(ranks, backward, 1)
        out += parameters(ranks)
    return out


def slow(replica: Any) -> list[Tensor]:
    states = [c.states["schedule"] for c in replica.worker.buckets]
    return [s[key] for s in states for key in ("anchor", "velocity") if key in s]


@pytest.mark.parametrize(
    ("size", "schedule"),
    [
        (2, "slowmo(3{})" + SMALL),
        (3, "slowmo(3, buffers='reset'{})" + SMALL),
        (4, "slowmo(2, beta=0.9, alpha=0.7, by_lr=False, nesterov=True{})"),
        (5, "slowmo(2, beta=0.0{})"),
        (3, "slowmo(2, inner=push_sum(){})" + SMALL),
        (4, "slowmo(2, inner=gossip(overlap=True), buffers='average'{})"),
        (3, "slowmo(2, inner=every_step(){})" + SMALL),
        (4, "hierarchical(1, 2, slowmo(3{}))"),
        (3, "post_local(2, slowmo(3{}))" + SMALL),
        (3, "bmuf(3, nesterov=True{})" + SMALL),
    ],
)
def test_it_trains_as_the_whole_state_does_to_the_bit(size: int, schedule: str) -> None:
    whole, ours = (trajectory(DENSE + schedule.format(said), size, 7) for said in ("", ", sharded=True"))
    assert all(bit_equal(pair) for pair in zip(whole, ours, strict=True))


def test_the_model_that_is_judged_is_the_same() -> None:
    """Nesterov's block momentum is judged without its look-ahead, which lies in shards here."""
    means = list[Tensor]()
    for said in "", ", sharded=True":
        ranks = make(DENSE + f"bmuf(3, nesterov=True{said})" + SMALL, 3)
        train(ranks, pull, 4)
        means.append(torch.stack([held(r) for r in ranks]).mean(0))
    torch.testing.assert_close(means[0], means[1], rtol=1e-5, atol=1e-6)


def test_ranks_may_count_differently() -> None:
    """Weighted models travel in place of weighted differences, so that it is the same but for rounding."""
    ends = list[Tensor]()
    for recipe in DENSE + "slowmo(3)", SHARDED:
        ranks = make(recipe, 3)
        for r in ranks:
            r.worker.ranks.weights = (0.5, 1.5, 1.0)
        train(ranks, pull, 6)
        ends.append(parameters(ranks)[0])
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-5)


def test_a_round_that_is_not_finite_is_dropped_on_all_ranks_and_leaves_no_trace() -> None:
    def broken(model: torch.nn.Module, rank: int, step: int) -> float:
        if (rank, step) == (2, 5):
            model.get_parameter("matrix").data[1, 3] = float("inf")
        return pull(model, rank, step)

    whole, ours = (trajectory(text + SMALL, 3, 10, broken) for text in (DENSE + "slowmo(3)", SHARDED))
    assert all(bit_equal(pair) for pair in zip(whole, ours, strict=True))
    after = [ours[3 * (step - 1) : 3 * step] for step in (3, 5, 6)]
    assert not after[1][2].isfinite().all()
    assert bit_equal([*after[0], *after[2]])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_rank_keeps_its_share_of_it(size: int) -> None:
    """Bytes of the slow state: all ranks together have what one had before."""
    whole, ours = make(DENSE + "slowmo(3)", size), make(SHARDED, size)
    for ranks in whole, ours:
        train(ranks, pull, 4)
    before = sum(t.untyped_storage().nbytes() for t in slow(whole[0]))
    shares = [sum(t.untyped_storage().nbytes() for t in slow(r)) for r in ours]
    assert sum(shares) == before
    assert max(shares) < 1.3 * before / size  # chunks are cut between rows


def test_its_bytes_are_those_of_the_dense_average_on_paper_and_on_the_wire() -> None:
    shapes = {"w": (64, 32), "b": (40,)}
    for size in (2, 3, 4):
        paper = [bytes_per_step(text, shapes, size) for text in (DENSE + "slowmo(3)", SHARDED)]
        assert paper[0] == paper[1] > 0
    half = bytes_per_step(DENSE + "slowmo(2, inner=every_step(), sharded=True)", shapes, 4)
    assert half - bytes_per_step("scatter(fp32())", shapes, 4) == pytest.approx(3 / 4 * 4 * (64 * 32 + 40) / 2, rel=0.1)


@pytest.mark.parametrize("recipe", [SHARDED + SMALL, DENSE + "slowmo(2, inner=push_sum(), sharded=True)"])
def test_a_resumed_run_differs_in_no_bit_after_any_step_of_two_rounds(recipe: str) -> None:
    undisturbed = trajectory(recipe, 3, 8)
    ranks = make(recipe, 3)
    for step in range(1, 7):
        train(ranks, pull, 1)
        again = resumed(recipe, contents(ranks))
        train(again, pull, 8 - step)
        assert all(bit_equal(pair) for pair in zip(parameters(again), undisturbed[-3:], strict=True))


def whole_anchor(dictionaries: list[dict[str, Any]]) -> Tensor:
    """By parameter and place, from the pieces of all ranks."""
    pieces = {
        (name.rpartition("@")[0], int(name.rpartition("@")[2])): tensor
        for d in dictionaries
        for key, tensor in d.items()
        if "/schedule/anchor/" in key and (name := key.partition("/anchor/")[2])
    }
    return torch.cat([pieces[place].reshape(-1) for place in sorted(pieces)])


@pytest.mark.parametrize(("old", "new", "cut"), [(4, 3, ""), (2, 4, SMALL), (3, 3, SMALL), (3, 1, "")])
def test_shards_are_cut_anew_for_other_ranks_and_other_blocks(old: int, new: int, cut: str) -> None:
    before, after = make(SHARDED, old), make(SHARDED + cut, new)
    train(before, pull, 4)
    saved = [checkpoint.save(r.worker) for r in before]
    for r in after:
        checkpoint.load(r.worker, saved)
        r.model.load_state_dict(before[0].model.state_dict())
    assert bit_equal([whole_anchor(saved), whole_anchor([checkpoint.save(r.worker) for r in after])])
    train(after, pull, 5)
    assert bit_equal(parameters(after))


def test_a_rank_s_own_shard_is_not_taken_for_what_another_cut_asks_of_it() -> None:
    before, after = make(SHARDED, 3), make(SHARDED + SMALL, 3)
    train(before, pull, 4)
    own = checkpoint.save(before[1].worker)
    with pytest.raises(CheckpointError, match=r"is sharded.*give the dictionaries of all ranks.*buckets"):
        checkpoint.load(after[1].worker, own)


REFUSED = {
    "scatter(qsgd()) + slowmo(8, sharded=True)": ("send models instead of differences", "allreduce(fp32())"),
    "allreduce(bf16()) + slowmo(8, sharded=True)": ("ranks have no whole anchor", "leave sharded out"),
    "slowmo(8, sharded=True) + rule('ndim < 2', allreduce(bf16()))": (
        "ranks have no whole anchor",
        "allreduce(fp32())",
    ),
    "slowmo(8, sharded=True) + error_feedback()": ("leave no residual", "leave the memory out"),
    "slowmo(8, sharded=True) + per_node(2)": ("not by way of its node", "leave the nodes out"),
    "slowmo(8, sharded=True) + adacomm(8)": ("own other elements", "drop it"),
    "allreduce + slowmo(8, inner=push_sum(), average=False, sharded=True)": (
        "its own whole anchor",
        "leave one of them out",
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_sharded_is_refused_with_the_reason_and_the_fix(text: str) -> None:
    with pytest.raises((RecipeError, AttachError)) as caught:
        Recipe.of(text)
    for words in REFUSED[text]:
        assert words in str(caught.value)
