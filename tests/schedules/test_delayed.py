"""Delayed: double buffering, as additions.md 2.1 says: x_(t+1) = x_t - lr mean C(g_(t-1))."""

from collections.abc import Callable

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import attached, data
from tests.runtime.gym import (
    Flat,
    Network,
    bit_equal,
    make,
    noise,
    parameters,
    pull,
    remembered,
    same_memory,
    sgd,
    spoiled,
    train,
)
from torch import Tensor, nn

import gossamer
from gossamer.core.errors import AttachError, RecipeError
from gossamer.integrations import ddp
from gossamer.recipe import Recipe
from gossamer.schedules import Delayed

Backward = Callable[[nn.Module, int, int], float]


def given(model: nn.Module, rank: int, step: int) -> float:
    """Gradients that do not depend on the model."""
    for i, p in enumerate(model.parameters()):
        p.grad = noise(i, rank, step, numel=p.numel()).view(p.shape)
    return 0.0


def bowl(curvature: float) -> Backward:
    def backward(model: nn.Module, rank: int, step: int) -> float:
        x = model.get_parameter("x")
        x.grad = curvature * (x.detach() - rank)
        return float((x.detach() - 0.5).abs().max())

    return backward


@pytest.mark.parametrize("size", [2, 3])
def test_it_is_the_formula(size: int) -> None:
    ranks, rate = make("allreduce + delayed()", size, Flat, sgd(0.1, 0.0)), 0.1
    x = ranks[0].flat().clone()
    waiting: Tensor | None = None
    for _ in range(6):
        train(ranks, bowl(1.5), 1)
        gradient = torch.stack([1.5 * (x - rank) for rank in range(size)]).mean(0)
        x = x if waiting is None else x - rate * waiting
        waiting = gradient
        assert bit_equal(parameters(ranks))
        torch.testing.assert_close(ranks[0].flat(), x, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    "recipe",
    [
        "allreduce",
        "gather(topk(ratio=0.2)) + error_feedback() + bucket(0.00002)",
        "scatter(qsgd(bits=4, bucket=16)) + diana(momentum=0.5)",
        "onebit_sgd",
    ],
)
def test_where_gradients_do_not_depend_on_the_model_it_is_the_plain_run_a_step_later(recipe: str) -> None:
    """So codecs, memories and momenta see what they see without it, in every bit."""
    late, plain = make(recipe + " + delayed()", 3), make(recipe, 3)
    train(late, given, 6)
    train(plain, given, 5)
    assert bit_equal([*parameters(late), *parameters(plain)])


def test_a_network_as_slow_as_a_step_costs_nothing() -> None:
    """At N = 2 a latency of L makes an all-reduce take 2 L; a step computes for one second."""

    def seconds(recipe: str, latency: float) -> float:
        return train(make(recipe, 2), pull, 10, Network(latency), lambda rank, step: 1.0).seconds

    assert seconds("allreduce + delayed()", 0.25) == seconds("allreduce + delayed()", 0.5) == 10.0
    assert seconds("allreduce", 0.5) == 20.0
    assert seconds("allreduce + delayed()", 1.0) == 1 + 9 * 2.0  # the wire's own time


def test_it_is_stable_below_half_of_what_plain_sgd_is() -> None:
    def end(recipe: str, curvature: float) -> float:
        ranks = make(recipe, 2, Flat, sgd(1.0, 0.0))
        train(ranks, bowl(curvature), 120)
        return ranks[0].losses[-1]

    assert end("allreduce + delayed()", 0.9) < 1e-2
    assert end("allreduce + delayed()", 1.1) > 10
    assert end("allreduce", 1.9) < 1e-2


def test_a_mean_that_is_not_finite_is_dropped_on_all_ranks() -> None:
    recipe = "gather(topk(ratio=0.2)) + error_feedback() + delayed()"
    ranks = make(recipe, 3)
    train(ranks, spoiled([(1, 4)], float("nan")), 4)
    memories, models = [remembered(r.worker) for r in ranks], parameters(ranks)
    train(ranks, pull, 1)  # it would land here
    assert bit_equal([*models, *parameters(ranks)])
    assert all(same_memory(before, remembered(r.worker)) for before, r in zip(memories, ranks))
    assert [(r.worker.record.dropped_rounds, dict(r.worker.record.spoilt)) for r in ranks] == [(1, {1: 1})] * 3
    train(ranks, pull, 1)
    assert bit_equal(parameters(ranks))
    assert not bit_equal([models[0], parameters(ranks)[0]])


def test_a_controller_may_cut_the_model_anew_while_gradients_wait() -> None:
    choice = "accordion(gather(topk(ratio=0.9)), gather(topk(ratio=0.3)), 2, interval=1, threshold=0.1)"
    ranks = make(f"gather(topk(ratio=0.9)) + error_feedback() + delayed() + {choice}", 2)
    cuts = set[int]()
    for _ in range(12):
        train(ranks, pull, 1)
        cuts.add(len(ranks[0].worker.buckets))
        assert bit_equal(parameters(ranks))
    assert len(cuts) > 1
    assert ranks[0].losses[-1] < ranks[0].losses[0]


def test_a_rank_alone_has_nothing_to_wait_for() -> None:
    late, plain = make("allreduce + delayed()", 1), make("allreduce", 1)
    for ranks in (late, plain):
        train(ranks, pull, 3)
    assert bit_equal([late[0].flat(), plain[0].flat()])


# -- the user's loop -------------------------------------------------------------------------------------------------------


def looped(rank: int, size: int) -> list[bool]:
    """Clip what lands; leave out a step; go on."""
    with attached("onebit_sgd + delayed()") as (model, optimizer, comm):
        seen, before = list[bool](), [p.detach().clone() for p in model.parameters()]
        for step in range(1, 7):
            optimizer.zero_grad()
            x, y = data(rank, step)
            (model(x) - y).square().mean().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            seen.append(bool(norm > 0))
            if step == 4:
                comm.skip()
            else:
                optimizer.step()
            if step == 1:
                assert all(p.equal(b) for p, b in zip(model.parameters(), before))
            comm.check_sync()
        return seen


def test_a_loop_that_clips_and_skips(gang2: Gang) -> None:
    """The first step has nothing to take, nor has the one after a step that was left out, and so sent nothing."""
    assert gang2.run(looped) == [[False, True, True, True, False, True]] * 2


def test_what_goes_by_this_steps_gradients_is_refused() -> None:
    def attach(**options: object) -> None:
        model = nn.Linear(2, 1)
        gossamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "onebit_sgd + delayed()", **options)  # pyright: ignore

    with pytest.raises(AttachError, match=r"delayed\(\) with a GradScaler: .* use bf16"):
        attach(scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(AttachError, match="with find_unused_parameters"):
        attach(find_unused_parameters=True)
    with pytest.raises(AttachError, match="DDP needs one at every step"):
        ddp.check(Recipe.of("onebit_sgd + delayed()"))
    with pytest.raises(RecipeError, match="a step may have none"):
        Recipe.of("signsgd + delayed()")
    assert repr(Recipe.of("onebit_sgd + delayed()").schedule) == repr(Delayed())
