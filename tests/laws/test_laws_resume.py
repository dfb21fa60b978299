"""Law 6: save anywhere, resume, and the trajectory is bit-equal; a change of world size keeps what is owed."""

import io
from typing import Any

import pytest
import torch
from tests.worker import fleet
from tests.worker.gym import bit_equal, by_name, make, on_all, parameters, pull, remembered, resumed, saved, train
from torch import Tensor

from gossamer.core.errors import CheckpointError
from gossamer.worker import checkpoint

ROUND = 3
STEPS = 2 * ROUND + 1
ROLES = ("memory", "exchange", "schedule", "mixer")


@pytest.mark.parametrize("recipe", fleet.ALL)
def test_resuming_after_any_step_of_two_rounds_changes_no_bit(recipe: str) -> None:
    size = 3
    undisturbed = make(recipe, size)
    train(undisturbed, pull, STEPS + 1)
    ranks = make(recipe, size)
    for step in range(1, STEPS):
        train(ranks, pull, 1)
        again = resumed(recipe, saved(ranks))
        train(again, pull, STEPS + 1 - step)
        for kept, fresh in zip(parameters(undisturbed), parameters(again), strict=True):
            assert bit_equal([kept, fresh]), f"saved after step {step}"


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        bit_equal([v, b[k]]) if isinstance(v, Tensor) else v == b[k] for k, v in a.items()
    )


@pytest.mark.parametrize("recipe", fleet.ALL)
def test_what_is_loaded_is_what_was_saved(recipe: str) -> None:
    ranks = make(recipe, 3)
    train(ranks, pull, 4)
    again = resumed(recipe, saved(ranks))
    for old, new in zip(ranks, again, strict=True):
        assert repr(new.worker.recipe) == repr(old.worker.recipe)
        assert new.worker.recipe == old.worker.recipe
        a, b = remembered(old.worker, *ROLES), remembered(new.worker, *ROLES)
        assert a.keys() == b.keys()
        assert all(a[k].shape == b[k].shape and a[k].dtype == b[k].dtype and bit_equal([a[k], b[k]]) for k in a)
        assert same(checkpoint.save(old.worker), checkpoint.save(new.worker))


@pytest.mark.parametrize("recipe", fleet.ALL)
def test_a_checkpoint_is_plain_data_and_rank_local_keys_are_distinct(recipe: str) -> None:
    ranks = make(recipe, max(2, fleet.smallest(recipe)))
    train(ranks, pull, 4)
    on_all(ranks, lambda w: w.quiesce())
    dictionaries = [checkpoint.save(r.worker) for r in ranks]
    for d in dictionaries:
        file = io.BytesIO()
        torch.save(d, file)
        back = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        assert back.keys() == d.keys()
    shared = set[str].intersection(*(set(d) for d in dictionaries))
    first, *others = [{k: d[k] for k in shared} for d in dictionaries]
    assert all(same(first, other) for other in others)


def test_a_checkpoint_is_a_copy() -> None:
    ranks = make("topk(ratio=0.1)", 2)
    train(ranks, pull, 2)
    saved_once = checkpoint.save(ranks[0].worker)
    before = {k: v.clone() for k, v in saved_once.items() if isinstance(v, Tensor)}
    for c in ranks[0].worker.channels:
        c.states["memory"]["residual"].fill_(7.0)
    assert all(bit_equal([v, saved_once[k]]) for k, v in before.items())


def moved(recipe: str, old: int, new: int, steps: int = 4):
    before = make(recipe, old)
    train(before, pull, steps)
    on_all(before, lambda w: w.quiesce())
    dictionaries = [checkpoint.save(r.worker) for r in before]
    after = make(recipe, new)
    for r in after:
        checkpoint.load(r.worker, dictionaries)
        r.model.load_state_dict(before[0].model.state_dict())
    return before, after


def total(ranks, role: str, key: str) -> dict[str, Tensor]:
    cut = [by_name(r.worker.channels, role, key) for r in ranks]
    return {n: sum(c[n].double() for c in cut) for n in cut[0]}


CHANGES = [(4, 2), (2, 4), (4, 1), (1, 3), (3, 8), (8, 3)]


@pytest.mark.parametrize(("old", "new"), CHANGES)
@pytest.mark.parametrize("recipe", [r for r in fleet.SYNCHRONOUS if "topk" in r and "diana" not in r])
def test_a_new_world_keeps_the_mean_residual_and_everything_owed(recipe: str, old: int, new: int) -> None:
    before, after = moved(recipe, old, new)
    a, b = total(before, "memory", "residual"), total(after, "memory", "residual")
    for name in a:
        torch.testing.assert_close(a[name] / old, b[name] / new, rtol=1e-6, atol=1e-7)
    a, b = total(before, "exchange", "owed"), total(after, "exchange", "owed")
    assert bool(a) == ("scatter" in recipe)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-6, atol=1e-7)
    train(after, pull, 3)
    assert bit_equal(parameters(after))


@pytest.mark.parametrize(("old", "new"), CHANGES)
@pytest.mark.parametrize("recipe", ["diana(bits=4, bucket=16)", "scatter(qsgd(bits=4, bucket=16)) + diana()"])
def test_a_new_world_keeps_the_learned_gradients_and_their_mean(recipe: str, old: int, new: int) -> None:
    before, after = moved(recipe, old, new)
    mean = {n: t / new for n, t in total(after, "memory", "own").items()}
    common = by_name(after[0].worker.channels, "memory", "common")
    owed = total(after, "exchange", "owed")
    for name, t in total(before, "memory", "own").items():
        torch.testing.assert_close(mean[name], t / old, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mean[name], common[name].double() + owed.get(name, 0.0), rtol=1e-5, atol=1e-5)
    assert all(
        bit_equal([common[n], t]) for r in after for n, t in by_name(r.worker.channels, "memory", "common").items()
    )


@pytest.mark.parametrize("recipe", [*fleet.LOCAL, *fleet.OVERLAP, *fleet.GOSSIP, *fleet.SYNCHRONOUS])
def test_every_recipe_trains_on_in_another_world(recipe: str) -> None:
    _, after = moved(recipe, 4, 3, steps=2 * ROUND)
    assert {r.worker.step for r in after} == {2 * ROUND + 1}
    train(after, pull, 2 * ROUND)
    assert all(model.isfinite().all() for model in parameters(after))
    if recipe in (*fleet.LOCAL, *fleet.SYNCHRONOUS):
        assert bit_equal(parameters(after))


def test_loading_all_dictionaries_into_the_same_world_takes_each_rank_its_own() -> None:
    for recipe in ("topk(ratio=0.1)", "first(backups=1, over=scatter(ternary(), feedback=1.0))", "osgp"):
        ranks = make(recipe, 3)
        train(ranks, pull, 3)
        on_all(ranks, lambda w: w.quiesce())
        dictionaries = [checkpoint.save(r.worker) for r in ranks]
        again = make(recipe, 3)
        for old, new in zip(ranks, again, strict=True):
            checkpoint.load(new.worker, dictionaries)
            a, b = remembered(old.worker, *ROLES), remembered(new.worker, *ROLES)
            assert a.keys() == b.keys()
            assert all(bit_equal([a[k], b[k]]) for k in a)


def test_a_checkpoint_of_another_recipe_is_refused_with_both_names() -> None:
    ranks = make("topk(ratio=0.1)", 1)
    with pytest.raises(CheckpointError, match=r"(?s)topk\(ratio=0.1\).*topk\(ratio=0.2\)"):
        checkpoint.load(make("topk(ratio=0.2)", 1)[0].worker, checkpoint.save(ranks[0].worker))


def test_something_else_than_a_checkpoint_is_refused() -> None:
    worker = make("allreduce", 1)[0].worker
    with pytest.raises(CheckpointError, match="format None"):
        checkpoint.load(worker, {"model": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="format 99"):
        checkpoint.load(worker, {**checkpoint.save(worker), "format": 99})


def test_missing_ranks_are_named() -> None:
    dictionaries = [checkpoint.save(r.worker) for r in make("allreduce", 3)]
    with pytest.raises(CheckpointError, match=r"of 3 ranks and holds rank\(s\) \[0, 2\]"):
        checkpoint.load(make("allreduce", 2)[0].worker, [dictionaries[0], dictionaries[2]])
    with pytest.raises(CheckpointError, match="its own"):
        checkpoint.load(make("allreduce", 3)[1].worker, dictionaries[0])
    with pytest.raises(CheckpointError, match="all old ranks"):
        checkpoint.load(make("allreduce", 2)[0].worker, dictionaries[0])
