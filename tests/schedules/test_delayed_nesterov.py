"""Delayed Nesterov (asynchronous DiLoCo) on the simulator: arrivals one by one, and momentum at every N-th."""

from collections.abc import Sequence

import pytest
import torch
from tests.runtime.gym import Flat, anchors, bit_equal, make, on_all, parameters, pull, sgd, train
from tests.schedules.test_quorum_rounds import learner, one_slow
from torch import nn

from gossamer.core.errors import AttachError, RecipeError
from gossamer.fabrics.sim import Network
from gossamer.recipe import Recipe
from gossamer.runtime import Worker
from gossamer.schedules.merging import DelayedNesterov

EVERY, LR, RATE, MOMENTUM = 4, 0.1, 0.7, 0.9


def known(model: nn.Module, rank: int, step: int) -> float:
    """A rank's gradient is its number plus one, wherever its model is."""
    for p in model.parameters():
        p.grad = torch.full_like(p, 1.0 + rank)
    return 0.0


def moved(order: Sequence[int], size: int, share: float) -> float:
    """How far the anchor goes if ranks arrive in this order, by the formula."""
    gone = velocity = arrived = 0.0
    for i, rank in enumerate(order, 1):
        own = EVERY * LR * (1 + rank)
        arrived += own
        if i % size:
            gone += RATE * (share * MOMENTUM * velocity + own / size)
            continue
        velocity = MOMENTUM * velocity + arrived / size
        gone += RATE * ((1 - share * size + share) * MOMENTUM * velocity + own / size)
        arrived = 0.0
    return gone


@pytest.mark.parametrize(
    "carrier", ["allreduce", "scatter(qsgd(bits=4, bucket=16)) + error_feedback() + bucket(0.00002)"]
)
@pytest.mark.parametrize("size", [3, 4])
def test_ranks_that_arrive_together_take_the_steps_of_diloco_bit_for_bit(carrier: str, size: int) -> None:
    rule = "overlap=0, grace=0.0, weigh='equal', least=3"
    ranks = make(f"{carrier} + quorum_rounds(3, quorum={size}, {rule}, delayed=0.0)", size)
    twins = make(f"{carrier} + slowmo(3, 0.9, 0.7, by_lr=False, nesterov=True)", size)
    for crew in ranks, twins:
        train(crew, pull, 10)
    assert all(bit_equal(pair) for pair in zip(parameters(ranks), parameters(twins)))
    assert all(bit_equal([anchors(a), anchors(b)]) for a, b in zip(ranks, twins))


@pytest.mark.parametrize("share", [0.0, 0.2, 1 / 3])
@pytest.mark.parametrize("paces", [(1.0, 1.001, 1.002), (1.0, 1.001, 2.1), (1.0, 2.1, 3.3)])
def test_the_anchor_follows_arrivals_as_the_formula_says(paces: tuple[float, ...], share: float) -> None:
    """In lock step, one after the other, c = 0: N differences and one momentum. Slow ranks arrive after as many steps."""
    recipe = f"async_diloco({EVERY}) + quorum_rounds({EVERY}, overlap=0, least={EVERY}, weigh='equal', delayed={share})"
    ranks = make(recipe, 3, Flat, sgd(LR, 0.0))
    start, rounds = parameters(ranks)[0], 3
    train(ranks, known, EVERY * rounds, seconds=lambda rank, step: paces[rank])
    on_all(ranks, Worker.quiesce)  # ranks that are done take the last rounds
    order = [r for _, r in sorted((paces[r] * k, r) for r in range(3) for k in range(1, rounds + 1))]
    for rank in ranks:
        assert learner(rank)._fragments[0].merged == EVERY * rounds
        far = torch.full_like(start, moved(order, 3, share))
        torch.testing.assert_close(start - anchors(rank), far, rtol=0, atol=1e-12)


def test_a_rank_twice_as_slow_arrives_half_as_often() -> None:
    ranks = make("async_diloco(4)", 2, Flat, sgd(LR, 0.0))
    taken = dict[int, int]()

    def counted(model: nn.Module, rank: int, step: int) -> float:
        if rank == 0 and step == 41:
            taken.update(ranks[0].worker.record.accepted)
        return known(model, rank, step)

    train(ranks, counted, 41, Network(latency=0.01), lambda rank, step: (1.0, 2.03)[rank])
    assert (taken[0], taken[1]) == (9, 4)  # what rank 0 answered after its 40th step is written after its 41st


def test_a_loss_of_ranks_closes_the_window_and_no_arrival_is_lost() -> None:
    """Three of four have arrived when two are lost: the next arrival moves the velocity, by all four."""
    (place,) = make("async_diloco(4)", 2, Flat)[0].worker.loop.buckets
    state, rule = place.states["schedule"], DelayedNesterov(0.5, 1.0, 0.0)
    state["anchor"] = torch.zeros(5, dtype=torch.float64)
    one = torch.ones(5, dtype=torch.float64)
    rule.take(place, one, 3, 4)
    assert int(state["arrivals"]) == 3
    assert "velocity" not in state
    rule.take(place, one, 1, 2)
    assert int(state["arrivals"]) == 0
    torch.testing.assert_close(state["velocity"], one * (3 / 4 + 1 / 2), rtol=0, atol=0)
    torch.testing.assert_close(state["anchor"], -one * (3 / 4 + 1 / 2) * 1.5, rtol=0, atol=0)


def test_it_learns_though_one_rank_is_slow() -> None:
    ranks = make("async_diloco(4, momentum=0.5)", 4)
    train(ranks, pull, 40, Network(latency=0.01), one_slow)
    assert all(r.losses[-1] < 0.5 * r.losses[0] for r in ranks[1:])


REFUSED: dict[str, tuple[str, str]] = {
    "async_diloco(4, share=-0.1)": ("between 0 and 1 divided by the number of ranks", "0 is usual"),
    "async_diloco(4, share=1.5)": ("got 1.5", "0 is usual"),
    "allreduce + quorum_rounds(4, fragments=2, delayed=0.0)": ("arrivals of whole models", "leave fragments out"),
    "allreduce + quorum_rounds(4, least=2, delayed=0.0)": ("after 4 steps of its own", "leave least out"),
    "allreduce + quorum_rounds(4, late='drop', delayed=0.0)": ("would never answer", "leave late out"),
    "allreduce + by_speed(quorum_rounds(4, delayed=0.0))": ("no rounds of local steps", "use local_sgd"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_right_is_refused_with_the_reason_and_the_fix(text: str) -> None:
    with pytest.raises(RecipeError) as refused:
        Recipe.of(text)
    assert all(part in str(refused.value) for part in REFUSED[text]), refused.value


def test_parts_that_add_up_to_more_than_the_velocity_are_refused() -> None:
    with pytest.raises((AttachError, RecipeError), match=r"delayed=0.3\) on 4 ranks.*use at most 1 / 4"):
        make("async_diloco(4, share=0.3)", 4)
