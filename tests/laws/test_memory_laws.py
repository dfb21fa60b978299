"""The law of memories: nothing is lost, nothing is written into, and the loss scale does not matter."""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from tests.laws.blocks import bits, block
from tests.laws.crew import Crew, mean
from tests.laws.samples import memories, pairs, quick
from tests.runtime.gym import bit_equal, make, parameters, pull, remembered, same_memory, spoiled, train

from gossamer.core.bucket import Bucket
from gossamer.core.contracts import Memory
from gossamer.exchanges import AllReduced, Gather, Scatter
from gossamer.memories import ErrorFeedback
from gossamer.recipe import Recipe


def one_setting_of_each(recipes: Iterable[Any]) -> Iterator[Any]:
    """A memory sees of an exchange its traits and what it says of its mean: around other settings of a codec it is slow."""
    seen = set[Any]()
    for recipe in recipes:
        (made,) = recipe.values
        e = made.exchange
        given = [(f.name, type(v)) for f in fields(e) if (v := getattr(e, f.name)) != f.default]
        kind = type(e), e.traits, e.any_size, *given, made.memory, made.schedule
        marks = [*recipe.marks, *([pytest.mark.slow] if kind in seen else [])]
        if not marks:
            seen.add(kind)
        yield pytest.param(made, id=recipe.id, marks=marks)


every_pair = pytest.mark.parametrize("recipe", [*one_setting_of_each(quick(pairs()))])
bookkeepers = [r for r in pairs() if r.memory == ErrorFeedback()]
every_memory = pytest.mark.parametrize("memory", memories(), ids=repr)


def gradients(size: int, step: int, dtype: torch.dtype = torch.float32) -> list[Bucket]:
    """Unequal data: each rank's own direction, and noise. Copies, for some laws write over them."""
    return [drawn.like(drawn.flat.clone()) for drawn in (_drawn(r, step, dtype) for r in range(size))]


@cache
def _drawn(rank: int, step: int, dtype: torch.dtype) -> Bucket:
    own, noise = block("matrices", dtype, seed=rank), block("matrices", dtype, seed=100 + 17 * step + rank)
    return own.like(own.flat + 0.5 * noise.flat)


def books() -> list[Any]:
    """All of them on three ranks. Alone, and on eight, which have the most to do, the first of each exchange and codec."""
    seen, out = set[Any](), list[Any]()
    for recipe, size in product(bookkeepers, (1, 2, 3, 4, 8)):
        e = recipe.exchange
        kind = size, type(e), type(e.codec) if isinstance(e, AllReduced | Scatter | Gather) else e, e.traits
        shown = size == 3 or (size in (1, 8) and kind not in seen)
        seen.add(kind)
        out.append(pytest.param(recipe, size, id=f"{size}-{recipe}", marks=[] if shown else pytest.mark.slow))
    return out


@pytest.mark.parametrize(("recipe", "size"), books())
def test_with_error_feedback_the_sum_of_means_and_what_is_kept_is_the_sum_of_gradients(
    recipe: Recipe, size: int
) -> None:
    crew, given, got = Crew(recipe, size), 0.0, 0.0
    for step in range(6):
        blocks = gradients(size, step)
        got = got + crew.step(blocks).double()
        given = given + mean(blocks)
    kept = crew.mean_of("residual") + crew.owed()
    tolerance = max(8 * recipe.exchange.sum_rounding, 1e-5)
    assert float((got + kept - given).norm() / given.norm()) < tolerance  # pyright: ignore


@every_pair
def test_a_memory_assigns_its_state_and_writes_into_nothing(recipe: Recipe) -> None:
    crew = Crew(recipe, 2)
    crew.step(gradients(2, 0))
    for step in (1, 2):
        states = [*crew.kept, *crew.carried]
        before = [(t, t.clone()) for s in states for t in s.values()]
        blocks = gradients(2, step)
        copies = [b.flat.clone() for b in blocks]
        crew.step(blocks)
        assert all(torch.equal(t, old) for t, old in before)
        assert all(torch.equal(b.flat, old) for b, old in zip(blocks, copies, strict=True))


@every_pair
def test_the_mean_may_be_written_over_the_gradient(recipe: Recipe) -> None:
    apart, over = Crew(recipe, 3), Crew(recipe, 3)
    for step in range(4):
        blocks = gradients(3, step)
        reused = [Bucket(b.flat.clone(), b.layout) for b in blocks]
        expected = apart.step(blocks)
        assert bits(over.step([Bucket(b.flat, b.layout, b.flat) for b in reused])) == bits(expected)
    for a, b in zip([*apart.kept, *apart.carried], [*over.kept, *over.carried], strict=True):
        assert {k: bits(v) for k, v in a.items()} == {k: bits(v) for k, v in b.items()}


@every_pair
def test_a_changing_loss_scale_changes_no_bit(recipe: Recipe) -> None:
    if not recipe.exchange.any_size:
        return  # it rounds small numbers to coarser steps, so its scale does matter
    plain, scaled = Crew(recipe, 2), Crew(recipe, 2)
    for step, scale in enumerate([1.0, 2.0**10, 2.0**10, 2.0**5, 2.0**16, 1.0]):
        blocks = gradients(2, step)
        expected = plain.step(blocks)
        got = scaled.step([b.like(b.flat * scale) for b in blocks], scale=scale)
        assert torch.equal(got / scale, expected), f"scale {scale}"


@every_pair
def test_zeros_stay_zeros(recipe: Recipe) -> None:
    crew = Crew(recipe, 2)
    for _ in range(3):
        zeros = [b.like(torch.zeros_like(b.flat)) for b in gradients(2, 0)]
        assert (crew.step(zeros) == 0).all()
    kept = {k: v for s in crew.kept for k, v in s.items() if v.dim()}
    assert all((v == 0).all() for v in kept.values())


@every_pair
def test_what_is_called_equal_is_bit_equal_on_all_ranks_and_the_rest_has_a_policy(recipe: Recipe) -> None:
    crew = Crew(recipe, 3)
    for step in range(3):
        crew.step(gradients(3, step))
    for states, part in (crew.kept, recipe.memory), (crew.carried, recipe.exchange):
        assert len({frozenset(s) for s in states}) == 1
        for key in states[0]:
            policy = part.policy(key)
            assert policy in ("equal", "mean", "owner", "drop")
            if policy == "equal":
                assert len({bits(s[key]) for s in states}) == 1, key


@every_memory
@pytest.mark.parametrize("size", [1, 3])
def test_around_a_dense_exchange_a_memory_without_momentum_gives_the_mean(memory: Memory, size: int) -> None:
    if memory.gain != 1 or "'sum'" in repr(memory) or getattr(memory, "eta", 1) != 1:
        return  # it has momentum, counts its own numbers twice, or averages over steps
    crew = Crew("allreduce", size, memory)
    for step in range(5):
        blocks = gradients(size, step, torch.float64)
        torch.testing.assert_close(crew.step(blocks), mean(blocks), rtol=1e-12, atol=1e-12)


@every_memory
def test_a_rate_of_following_lies_between_zero_and_one(memory: Memory) -> None:
    for omega in (0.0, 0.5, 10.0, 1e6):
        assert 0 <= memory.follow(omega) <= 1
        assert (memory.follow(omega) > 0) == ("wants unbiased" in memory.traits)


@every_pair
def test_a_step_that_is_not_finite_on_one_rank_leaves_all_memories_alone(recipe: Recipe) -> None:
    """In the third step, and again, with another value, in the fifth."""
    ranks = make(recipe, 2)
    for step, value in (3, float("nan")), (5, float("-inf")):
        train(ranks, pull, step - ranks[0].worker.step)
        memories, models = [remembered(r.worker) for r in ranks], parameters(ranks)
        train(ranks, spoiled([(1, step)], value), 1)
        assert all(same_memory(before, remembered(r.worker)) for before, r in zip(memories, ranks, strict=True))
        assert all(bit_equal(pair) for pair in zip(models, parameters(ranks), strict=True))
