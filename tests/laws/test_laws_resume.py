"""Law 6: save anywhere, resume, and the trajectory is bit-equal; a change of world size keeps what is owed."""

import io
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from tests.runtime import fleet
from tests.runtime.gym import (
    Odd,
    Replica,
    bit_equal,
    by_name,
    contents,
    make,
    on_all,
    parameters,
    pull,
    remembered,
    resumed,
    saved,
    sgd,
    train,
)
from torch import Tensor

from gossamer.checkpoints import state as checkpoint
from gossamer.controllers import Fixed
from gossamer.core.errors import CheckpointError
from gossamer.recipe import Recipe
from gossamer.schedules import EveryStep

ROUND = 3
STEPS = 2 * ROUND + 1
ROLES = ("memory", "exchange", "schedule", "mixer")


@pytest.mark.parametrize("recipe", fleet.each(fleet.ALL))
def test_resuming_after_any_step_of_two_rounds_changes_no_bit(recipe: str) -> None:
    """By induction: a run that goes on for one step after any file writes, to the bit, what the next file holds.

    The files themselves are those of the next test.
    """
    size, steps = 3, steps_until_it_repeats(recipe)
    undisturbed = make(recipe, size)
    train(undisturbed, pull, steps)
    ranks = make(recipe, size)
    train(ranks, pull, 1)
    held = contents(ranks)
    for step in range(1, steps):
        again = resumed(recipe, held)
        for runs in (ranks, again):
            train(runs, pull, 1)
        held = contents(ranks)
        for kept, fresh in zip(held, contents(again), strict=True):
            assert same(flattened(kept), flattened(fresh)), f"saved after step {step}"
    assert all(bit_equal(pair) for pair in zip(parameters(undisturbed), parameters(ranks), strict=True))


def steps_until_it_repeats(recipe: str) -> int:
    """Two rounds and a step. Where each step is a round there is something to remember after one, and to add to after two."""
    made = Recipe.of(recipe)
    alike = made.schedule == EveryStep() and made.controller == Fixed() and made.update is None
    return 4 if alike and "warmup" not in recipe else STEPS


def flattened(content: dict[str, Any]) -> dict[str, Any]:
    """All that a next step may depend on, by name: parameters, the optimizer's state, and what the worker saves."""
    state = content["opt"]
    momenta = {f"{i}/{k}": v for i, entry in state["state"].items() for k, v in entry.items()}
    rates = {f"group {i}": g["lr"] for i, g in enumerate(state["param_groups"])}
    return {**content["model"], **momenta, **rates, **content["comm"]}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        bit_equal([v, b[k]]) if isinstance(v, Tensor) else v == b[k] for k, v in a.items()
    )


@cache
def filed(recipe: str) -> tuple[list[Replica], list[dict[str, Any]]]:
    """Three ranks after four steps, and what is in the files that they wrote. Two laws look at them, and change nothing."""
    ranks = make(recipe, 3)
    train(ranks, pull, 4)
    return ranks, [torch.load(io.BytesIO(file), weights_only=True) for file in saved(ranks)]


@pytest.mark.parametrize("recipe", fleet.each(fleet.ALL))
def test_what_is_loaded_is_what_was_saved(recipe: str) -> None:
    ranks, files = filed(recipe)
    again = resumed(recipe, files)
    for old, new in zip(ranks, again, strict=True):
        assert repr(new.worker.recipe) == repr(old.worker.recipe)
        assert new.worker.recipe == old.worker.recipe
        a, b = remembered(old.worker, *ROLES), remembered(new.worker, *ROLES)
        assert a.keys() == b.keys()
        assert all(a[k].shape == b[k].shape and a[k].dtype == b[k].dtype and bit_equal([a[k], b[k]]) for k in a)
        assert same(checkpoint.save(old.worker), checkpoint.save(new.worker))


@pytest.mark.parametrize("recipe", fleet.each(fleet.ALL))
def test_a_checkpoint_is_plain_data_and_rank_local_keys_are_distinct(recipe: str) -> None:
    """Plain enough for `weights_only`, with which the files were read."""
    ranks, files = filed(recipe)
    dictionaries = [checkpoint.save(r.worker) for r in ranks]
    for d, file in zip(dictionaries, files, strict=True):
        assert file["comm"].keys() == d.keys()
    shared = set[str].intersection(*(set(d) for d in dictionaries))
    first, *others = [{k: d[k] for k in shared} for d in dictionaries]
    assert all(same(first, other) for other in others)


def test_a_checkpoint_is_a_copy() -> None:
    ranks = make("topk(ratio=0.1)", 2)
    train(ranks, pull, 2)
    saved_once = checkpoint.save(ranks[0].worker)
    before = {k: v.clone() for k, v in saved_once.items() if isinstance(v, Tensor)}
    for c in ranks[0].worker.buckets:
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
    cut = [by_name(r.worker.buckets, role, key) for r in ranks]
    return {n: sum(c[n].double() for c in cut) for n in cut[0]}


CHANGES = [*[(4, 1), (1, 3), (2, 4)], *(pytest.param(*c, marks=pytest.mark.slow) for c in ((4, 2), (3, 8), (8, 3)))]


@pytest.mark.parametrize(("old", "new"), CHANGES)
@pytest.mark.parametrize("recipe", [r for r in fleet.SYNCHRONOUS if "topk" in r and "diana" not in r])
def test_a_new_world_keeps_the_mean_residual_and_everything_owed(recipe: str, old: int, new: int) -> None:
    before, after = moved(recipe, old, new)
    a, b = total(before, "memory", "residual"), total(after, "memory", "residual")
    for name in a:
        torch.testing.assert_close(a[name] / old, b[name] / new, rtol=1e-6, atol=1e-7)
    a, b = total(before, "exchange", "owed"), total(after, "exchange", "owed")
    owes = "scatter" in recipe and "nodes" not in recipe  # of a node, what it owes is the memory's
    assert bool(a) == (owes and old > 1)  # alone, nothing is exchanged
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-6, atol=1e-7)
    train(after, pull, 3)
    assert bit_equal(parameters(after))


@pytest.mark.parametrize("everybody", [True, False])
def test_other_buckets_keep_everything_owed_with_the_own_dictionary_or_with_all(everybody: bool) -> None:
    recipe = "scatter(topk(ratio=0.2)) + error_feedback()"
    before = make(recipe, 3)
    train(before, pull, 4)
    dictionaries = [checkpoint.save(r.worker) for r in before]
    after = make(f"{recipe} + bucket(0.0005)", 3)
    for r, own in zip(after, dictionaries, strict=True):
        checkpoint.load(r.worker, dictionaries if everybody else own)
    (a, b), (c, d) = ([total(ranks, *where) for where in OWED] for ranks in (before, after))
    for name in a:
        torch.testing.assert_close(a[name] + b[name] / 3, c[name] + d[name] / 3, rtol=1e-6, atol=1e-6)
    assert everybody == all(torch.equal(b[name], d[name]) for name in b)
    train(after, pull, 1)


OWED = ("exchange", "owed"), ("memory", "residual")


def test_what_chunk_owners_of_one_node_owe_goes_to_the_memory_where_nodes_are_several() -> None:
    """It would be added at each step anew, and only where a chunk's owner in the node is its owner among all."""
    before, after = moved(
        "nodes(scatter(topk(ratio=0.2)), 2, inside=scatter(topk(ratio=0.2))) + error_feedback()", 2, 4
    )
    owed = total(before, "exchange", "inside.owed")
    a, b = total(before, "memory", "residual"), total(after, "memory", "residual")
    assert any(t.any() for t in owed.values())
    for name in a:
        torch.testing.assert_close(a[name] / 2 + owed[name], b[name] / 4, rtol=1e-6, atol=1e-6)
    train(after, pull, 3)
    assert total(after, "exchange", "inside.owed") == {}
    assert bit_equal(parameters(after))


@pytest.mark.parametrize(("old", "new"), CHANGES)
@pytest.mark.parametrize("recipe", ["diana(bits=4, bucket=16)", "scatter(qsgd(bits=4, bucket=16)) + diana()"])
def test_a_new_world_keeps_the_learned_gradients_and_their_mean(recipe: str, old: int, new: int) -> None:
    before, after = moved(recipe, old, new)
    mean = {n: t / new for n, t in total(after, "memory", "own").items()}
    common = by_name(after[0].worker.buckets, "memory", "common")
    owed = total(after, "exchange", "owed")
    for name, t in total(before, "memory", "own").items():
        torch.testing.assert_close(mean[name], t / old, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mean[name], common[name].double() + owed.get(name, 0.0), rtol=1e-5, atol=1e-5)
    assert all(
        bit_equal([common[n], t]) for r in after for n, t in by_name(r.worker.buckets, "memory", "common").items()
    )


@pytest.mark.parametrize("recipe", [*fleet.LOCAL, *fleet.OVERLAP, *fleet.GOSSIP, *fleet.SYNCHRONOUS, *fleet.OWN])
def test_every_recipe_trains_on_in_another_world(recipe: str) -> None:
    _, after = moved(recipe, 4, 3, steps=2 * ROUND)
    assert {r.worker.step for r in after} == {2 * ROUND + 1}
    train(after, pull, 2 * ROUND)
    assert all(model.isfinite().all() for model in parameters(after))
    if recipe in (*fleet.LOCAL, *fleet.SYNCHRONOUS):
        assert bit_equal(parameters(after))


def test_loading_all_dictionaries_into_the_same_world_takes_each_rank_its_own() -> None:
    for recipe in ("topk(ratio=0.1)", "scatter(ternary(), feedback=1.0) + backup_workers(backups=1)", "osgp"):
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


def one(recipe: str, steps: int = 0, size: int = 1, **options: Any) -> Any:
    ranks = make(recipe, size, **options)
    train(ranks, pull, steps)
    on_all(ranks, lambda w: w.quiesce())
    return ranks[0].worker


def test_a_checkpoint_of_another_recipe_is_refused_with_both_names() -> None:
    with pytest.raises(CheckpointError, match=r"(?s)ratio=0.1.*ratio=0.2"):
        checkpoint.load(one("topk(ratio=0.2)"), checkpoint.save(one("topk(ratio=0.1)")))


def test_a_state_of_no_known_shape_is_refused_and_not_cut_up() -> None:
    worker = one("topk(ratio=0.1)", 2, size=2)
    worker.buckets[0].states["memory"]["sketch"] = torch.zeros(3, 4)
    with pytest.raises(
        CheckpointError, match=r"'sketch' of the bucket of 'scale' has 12 elements.*under 'sketch:NAME'"
    ):
        checkpoint.save(worker)


def test_something_else_than_a_checkpoint_is_refused() -> None:
    worker = one("allreduce")
    saved = checkpoint.save(worker)
    for other, message in {
        "text": "not a checkpoint: .* not a str",
        (1,): "not a checkpoint: .* not a int",
        (): "got an empty list",
        "whole": "not a checkpoint of a communicator: it holds 'comm', 'model', and no 'format'; give it the entry 'comm'",
        "early": r"written by an early gossamer.* in format 1; gossamer [\d.]+ reads format 3\. Go on with",
        "later": "written by gossamer 3.1 in format 99",
    }.items():
        given = {
            "whole": {"model": torch.zeros(3), "comm": saved},
            "early": {**{k: v for k, v in saved.items() if k != "gossamer"}, "format": 1},
            "later": {**saved, "format": 99, "gossamer": "3.1"},
        }.get(other, other)
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load(worker, given)


class Headless(Odd):
    """The same without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = None  # type: ignore[assignment]


class Other(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.head = self.bias
        self.bias = None  # type: ignore[assignment]


class Longer(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(8))


class Half(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(self.bias.detach().half())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Headless, "'bias' is missing in this model, or frozen"),
        (Other, "it has no 'head'; a layer that was frozen when it was saved must be frozen until it is loaded"),
        (Longer, r"'bias' was float32 \[7\] and is now float32 \[8\]"),
        (Half, r"'bias' was float32 \[7\] and is now float16 \[7\]"),
    ],
)
@pytest.mark.parametrize("recipe", ["topk(ratio=0.1)", "slowmo(3)"])
def test_another_models_dictionary_is_refused_by_name(recipe: str, model: Any, message: str) -> None:
    saved = checkpoint.save(one(recipe, 4))
    with pytest.raises(CheckpointError, match=f"of another model: {message}"):
        checkpoint.load(one(recipe, model=model), saved)


LOSSES: dict[str, Callable[[dict[str, Any], str], Any]] = {
    "dropped": lambda d, key: d.pop(key),
    "renamed": lambda d, key: d.update({key + "x": d.pop(key)}),
    "reshaped": lambda d, key: d.update({key: d[key].reshape(-1, 1)}),
    "retyped": lambda d, key: d.update({key: d[key].double()}),
    "changed by a bit": lambda d, key: d.update({key: torch.nextafter(d[key], torch.tensor(9.0))}),
    "sparse": lambda d, key: d.update({key: d[key].to_sparse()}),
    "no tensor": lambda d, key: d.update({key: 3}),
    "endless": lambda d, key: d.update({key: 10**5000}),
}


@pytest.mark.parametrize("how", LOSSES)
@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        ("topk(ratio=0.1)", "rank0/memory/residual/bias"),
        ("slowmo(3)", "equal/schedule/anchor/matrix"),
        ("osgp(every=3)", "rank0/mixer/x/still"),
    ],
)
def test_an_entry_that_is_not_as_it_was_is_named_and_changes_nothing(recipe: str, key: str, how: str) -> None:
    worker, another = one(recipe, 4, size=2), one(recipe, 2, size=2)
    saved, before = checkpoint.save(worker), checkpoint.save(another)
    LOSSES[how](saved, key)
    with pytest.raises(CheckpointError, match=f"damaged: '{key}"):
        checkpoint.load(another, saved)
    assert same(before, checkpoint.save(another))


@pytest.mark.parametrize("value", [None, "5", 5.0, True, -1, 10**5000, torch.zeros(3)], ids=lambda v: type(v).__name__)
def test_a_head_with_something_else_in_it_is_refused(value: Any) -> None:
    worker = one("allreduce")
    for key in ("step", "size", "seed", "recipe", "adopted", "parameters", "cut", "gossamer"):
        with pytest.raises(CheckpointError, match="damaged"):
            checkpoint.load(worker, {**checkpoint.save(worker), key: value})
    with pytest.raises(CheckpointError, match=r"no 'format'|in format -1"):
        checkpoint.load(worker, {**checkpoint.save(worker), "format": value})


def test_a_huge_size_is_refused_at_once() -> None:
    worker = one("allreduce")
    with pytest.raises(CheckpointError, match=r"of 1000000000000000000 ranks and holds rank\(s\) \[0\]"):
        checkpoint.load(worker, {**checkpoint.save(worker), "size": 10**18})


def test_dictionaries_of_different_moments_are_not_merged() -> None:
    ranks = make("slowmo(2)", 3)
    train(ranks, pull, 4)
    early = [checkpoint.save(r.worker) for r in ranks]
    train(ranks, pull, 2)
    late = [checkpoint.save(r.worker) for r in ranks]
    with pytest.raises(CheckpointError, match="not saved together: step is 5 in one and 7 in another"):
        checkpoint.load(one("slowmo(2)", size=2), [early[0], late[1], late[2]])
    with pytest.raises(CheckpointError, match=r"of 3 ranks and holds rank\(s\) \[0, 2\]"):
        checkpoint.load(one("slowmo(2)", size=2), [early[0], early[0], early[2]])


def test_dictionaries_of_different_runs_are_not_merged() -> None:
    runs = []
    for rate in (0.05, 0.1):
        ranks = make("slowmo(2)", 2, optimizer=sgd(lr=rate))
        train(ranks, pull, 4)
        runs.append([checkpoint.save(r.worker) for r in ranks])
    with pytest.raises(CheckpointError, match="not saved together: they differ in 'equal/schedule/anchor/"):
        checkpoint.load(one("slowmo(2)", size=3), [runs[0][0], runs[1][1]])


@pytest.mark.parametrize("recipe", ["topk(ratio=0.1)", "diana(bits=4, bucket=16)", "slowmo(3)", "sgp(every=3)"])
def test_a_model_may_be_cut_otherwise_when_a_run_goes_on(recipe: str) -> None:
    ranks = make(recipe, 2)
    train(ranks, pull, 4)
    again = make(recipe + fleet.SMALL, 2)
    for old, new in zip(ranks, again, strict=True):
        checkpoint.load(new.worker, checkpoint.save(old.worker))
        assert len(new.worker.buckets) > len(old.worker.buckets)
        a, b = checkpoint.save(old.worker), checkpoint.save(new.worker)
        differs = ("cut", "recipe", "adopted", "due")
        assert same(*({k: v for k, v in d.items() if k not in differs and "contents" not in k} for d in (a, b)))
    train(again, pull, 2)


def test_messages_on_their_way_fit_only_the_cut_they_were_sent_in() -> None:
    ranks = make("osgp", 2)
    train(ranks, pull, 4)
    on_all(ranks, lambda w: w.quiesce())
    with pytest.raises(
        CheckpointError, match=r"messages were in flight .* buckets and parameter groups of the saved recipe"
    ):
        checkpoint.load(one("osgp" + fleet.SMALL, size=2), checkpoint.save(ranks[0].worker))


def test_an_anchor_that_a_new_layer_lacks_is_not_taken_for_zero() -> None:
    worker = one("slowmo(3)" + fleet.SMALL, 4, size=2)
    worker.buckets[-1].states["schedule"].clear()  # as of a layer that was unfrozen a moment ago
    saved = checkpoint.save(worker)
    for recipe in ("slowmo(3)", "slowmo(3)" + fleet.SMALL):
        with pytest.raises(
            CheckpointError, match=r"has a (anchor|velocity|lr) of other parameters and none of 'matrix'"
        ):
            checkpoint.load(one(recipe, size=2), saved)


class Colon(torch.nn.Module):
    """Names as a ParameterDict may have them."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = torch.nn.ParameterDict({"a:b": torch.ones(4, 3), "c/d": torch.ones(40, 30)})


@pytest.mark.parametrize("recipe", ["topk(ratio=0.1)", "powersgd"])
def test_names_with_colons_and_slashes_are_names(recipe: str) -> None:
    worker, again = one(recipe, 2, size=2, model=Colon), one(recipe, size=2, model=Colon)
    checkpoint.load(again, checkpoint.save(worker))
    assert {k for c in again.buckets for k in c.states["memory"]} == {"residual"}
    assert same(checkpoint.save(worker), checkpoint.save(again))


def test_missing_ranks_are_named() -> None:
    dictionaries = [checkpoint.save(r.worker) for r in make("allreduce", 3)]
    with pytest.raises(CheckpointError, match=r"of 3 ranks and holds rank\(s\) \[0, 2\]"):
        checkpoint.load(make("allreduce", 2)[0].worker, [dictionaries[0], dictionaries[2]])
    with pytest.raises(CheckpointError, match="its own"):
        checkpoint.load(make("allreduce", 3)[1].worker, dictionaries[0])
    with pytest.raises(CheckpointError, match="all old ranks"):
        checkpoint.load(make("allreduce", 2)[0].worker, dictionaries[0])
