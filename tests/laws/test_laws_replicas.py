"""Law 1: replicas that should be equal are bit-equal on every rank, at every step."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from tests.runtime import fleet
from tests.runtime.gym import anchors, bit_equal, held, land, make, noise, on_all, parameters, pull, train

SIZES = [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow), 8]
STEPS = 7


def settling() -> Iterator[Any]:
    """All of them alone and on three ranks; on eight those by hand, which have each exchange: a part goes its way with both."""
    for recipe, size in product(fleet.each(fleet.SETTLING), SIZES):
        given = size if isinstance(size, int) else size.values[0]
        marks = [*recipe.marks, *([] if isinstance(size, int) else size.marks)]
        many = given == 8 and recipe.id not in fleet.BY_HAND
        yield pytest.param(
            recipe.id, given, id=f"{recipe.id}-{given}", marks=[*marks, *([pytest.mark.slow] if many else [])]
        )


@pytest.mark.parametrize(("recipe", "size"), [*settling()])
def test_synchronous_replicas_are_bit_equal_after_every_step(recipe: str, size: int) -> None:
    ranks = make(recipe, size)
    start = parameters(ranks)[0]
    for _ in range(STEPS - 2):
        train(ranks, pull, steps=1)
        assert bit_equal(parameters(ranks))
    assert not bit_equal([start, parameters(ranks)[0]])
    assert parameters(ranks)[0].isfinite().all()


@pytest.mark.parametrize("size", SIZES[2:])
@pytest.mark.parametrize("recipe", fleet.QUORUM)
def test_backup_workers_hold_equal_replicas_after_every_step(recipe: str, size: int) -> None:
    ranks = make(recipe, size)
    for _ in range(STEPS):
        train(ranks, pull, steps=1)
        assert bit_equal(parameters(ranks))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("recipe", fleet.OWN)
def test_replicas_that_step_with_their_own_gradient_are_equal_after_every_third_step(recipe: str, size: int) -> None:
    ranks = make(recipe, size)
    equal = list[bool]()
    for step in range(1, STEPS + 1):
        train(ranks, pull, steps=1)
        equal.append(bit_equal(parameters(ranks)))
        assert equal[-1] or not ranks[0].worker.recipe.is_synced(step)
    assert equal[2]
    assert equal[5]
    assert size == 1 or not all(equal)


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("recipe", fleet.LOCAL)
def test_local_replicas_meet_at_every_round_and_anchors_never_part(recipe: str, size: int) -> None:
    ranks = make(recipe, size)
    for step in range(1, STEPS + 1):
        train(ranks, pull, steps=1)
        assert bit_equal([anchors(r) for r in ranks])
        if step % 3 == 0:
            assert bit_equal(parameters(ranks))
        if size > 1 and "push_sum" not in recipe and "sgp" not in recipe:
            assert bit_equal(parameters(ranks)) == ranks[0].worker.recipe.schedule.ends_round(step) == (step % 3 == 0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("recipe", fleet.OVERLAP)
def test_overlapping_replicas_share_their_anchor_and_velocity(recipe: str, size: int) -> None:
    ranks = make(recipe, size)
    for _ in range(3 * STEPS):
        train(ranks, pull, steps=1)
        for key in ("anchor", "velocity"):
            held = [torch.cat([c.states["schedule"].get(key, c.empty()) for c in r.worker.buckets]) for r in ranks]
            assert bit_equal(held)


@pytest.mark.parametrize("recipe", [*fleet.OVERLAP, "osgp(every=3)"])
def test_a_round_whose_messages_travel_ends_just_before_they_land(recipe: str) -> None:
    ranks = make(recipe, 3)
    for step in range(1, 3 * STEPS):
        run = train(ranks, pull, steps=1)
        landed = step % 3 == 0
        assert {e.step for e in run.ledger.entries} == ({step} if landed else set())  # the next ones are off
        assert ranks[0].worker.recipe.schedule.ends_round(step) == (step % 3 == 2)


def push_apart(model: torch.nn.Module, rank: int, step: int) -> float:
    """Gradients that do not depend on the model, so that the sum of all models is known in advance."""
    for i, p in enumerate(model.parameters()):
        p.grad = noise(i, rank, step, numel=p.numel()).view(p.shape) + rank
    return 0.0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("recipe", fleet.GOSSIP)
def test_gossip_moves_the_sum_of_models_as_the_sum_of_gradients_does(recipe: str, size: int) -> None:
    ranks, twins = make(recipe, size), make("allreduce", size)
    train(twins, push_apart, STEPS)
    train(ranks, push_apart, STEPS)
    on_all(ranks, land)
    mean = sum(held(r) for r in ranks) / size
    weights = sum(float(c.states["mixer"].get("w", 1.0)) for r in ranks for c in r.worker.buckets)
    assert weights == pytest.approx(size * len(ranks[0].worker.buckets), rel=1e-6)
    torch.testing.assert_close(mean, twins[0].flat(), rtol=1e-5, atol=1e-5)


def test_more_micro_batches_than_one_leave_replicas_equal() -> None:
    ranks = make("qsgd + every_step(micro_batches=3, rate=3.0)", 3)
    train(ranks, pull, 4)
    assert bit_equal(parameters(ranks))
