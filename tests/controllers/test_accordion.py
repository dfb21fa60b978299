"""Accordion: the self-tests of the method notes, on scripted gradients and in whole runs."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from tests.runtime.gym import (
    Flat,
    bit_equal,
    by_name,
    make,
    noise,
    parameters,
    pull,
    resumed,
    saved,
    sgd,
    spoiled,
    train,
)
from torch import Tensor

from gossamer.codecs import FP32, TopK
from gossamer.controllers import Accordion, AccordionBatch, Fixed
from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Facts
from gossamer.core.errors import RecipeError
from gossamer.exchanges import AllReduced, Gather
from gossamer.memories import ErrorFeedback
from gossamer.recipe import Recipe
from gossamer.simulate import Replica

MILD, HARSH = Gather(TopK(0.9)), Gather(TopK(0.1))
EPOCH = 3


def recipe(**options) -> Recipe:
    return Recipe(
        MILD, ErrorFeedback(), controller=Accordion(MILD, HARSH, **{"epoch": EPOCH, "interval": 1, **options})
    )


class Script:
    """Feeds a controller gradients of known norms, step by step, and keeps what it decides."""

    def __init__(self, start: Recipe) -> None:
        self.recipe, self.state, self.step = start, State(), 0

    def one(self, norms: dict[str, float], lr: float = 0.1) -> Recipe:
        self.step += 1
        blocks = [Bucket.of({name: torch.tensor([0.6, -0.8]) * norm}) for name, norm in norms.items()]
        self.recipe = self.recipe.controller.decide(Facts(self.step, lr, blocks), self.recipe, self.state)
        return self.recipe

    def epoch(self, lr: float = 0.1, **norms: float) -> set[str]:
        """An epoch whose accumulated gradients have these norms; the harsh parameters after it."""
        for _ in range(EPOCH):
            self.one({name: norm / EPOCH for name, norm in norms.items()}, lr)
        return harsh(self.recipe)


def harsh(recipe: Recipe) -> set[str]:
    assert recipe.exchange == MILD
    assert all(e == HARSH for e in recipe.routes.values())
    return set(recipe.routes)


# -- decisions --------------------------------------------------------------------------------------------------------


def test_a_parameter_is_critical_exactly_at_the_drop() -> None:
    script = Script(recipe())
    assert [script.epoch(w=norm) for norm in (10, 10, 4, 4, 3, 1.5, 1.5)] == [
        set(),  # nothing to compare with: all start mild
        {"w"},
        set(),  # fell by 60 %
        {"w"},
        {"w"},  # by 25 %
        set(),  # by exactly half
        {"w"},
    ]


def test_a_rise_is_as_critical_as_a_drop() -> None:
    script = Script(recipe())
    assert [script.epoch(w=norm) for norm in (10, 14.9, 25)] == [set(), {"w"}, set()]


def test_parameters_are_judged_one_by_one() -> None:
    script = Script(recipe())
    script.epoch(a=10, b=10, c=1)
    assert script.epoch(a=10, b=2, c=1.2) == {"a", "c"}
    assert script.epoch(a=1, b=2, c=1.2) == {"b", "c"}


def test_the_norm_is_of_the_sum_not_the_sum_of_norms() -> None:
    """Gradients that cancel within the epoch have no length together, however long each is."""
    script = Script(recipe())
    script.epoch(w=9)
    for norm in (300.0, -300.0, 9.0):
        script.one({"w": norm})
    assert harsh(script.recipe) == {"w"}


def test_a_parameter_without_any_gradient_stays_mild() -> None:
    script = Script(recipe())
    assert [script.epoch(w=norm) for norm in (0, 0, 0, 5, 5)] == [set(), set(), set(), set(), {"w"}]


def test_only_every_interval_th_epoch_counts() -> None:
    script = Script(recipe(interval=3))
    seen = [script.epoch(w=norm) for norm in (10, 1, 1000, 10, 0.1, 77, 10, 10, 10, 2)]
    assert seen == [set()] * 3 + [{"w"}] * 6 + [set()]


def two_groups(model: torch.nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    return torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": others, "lr": 0.001}])


def steady(model: torch.nn.Module, rank: int, step: int) -> float:
    for i, p in enumerate(model.parameters()):
        p.grad = noise(i, numel=p.numel()).view(p.shape)
    return 0.0


def test_a_rate_that_is_cut_in_one_parameter_group_makes_that_group_mild() -> None:
    """Whether it is the largest of all rates or not; another group's parameters stay as they were judged."""
    ranks = make("accordion(epoch=1, mild=3, harsh=1, interval=1, threshold=10.0)", 2, optimizer=two_groups)
    train(ranks, steady, 3)
    everything = set(ranks[0].worker.recipe.routes)
    assert everything == {"matrix", "turned", "still", "bias", "scale"}
    for cut, names in ((1, everything - {"matrix"}), (0, {"matrix"})):
        for rank in ranks:
            rank.optimizer.param_groups[cut]["lr"] /= 10
        train(ranks, steady, 1)
        assert set(ranks[0].worker.recipe.routes) == everything - names
        train(ranks, steady, 1)
        assert set(ranks[0].worker.recipe.routes) == everything


@pytest.mark.parametrize(("before", "after", "overrides"), [(0.1, 0.01, True), (0.1, 0.05, True), (0.1, 0.051, False)])
def test_a_rate_that_halves_at_once_makes_all_mild_until_the_next_check(
    before: float, after: float, overrides: bool
) -> None:
    script = Script(recipe())
    script.epoch(lr=before, a=10, b=10)
    assert script.epoch(lr=before, a=10, b=10) == {"a", "b"}
    script.one({"a": 10 / EPOCH, "b": 10 / EPOCH}, after)
    assert harsh(script.recipe) == (set() if overrides else {"a", "b"})
    script.one({"a": 10 / EPOCH, "b": 10 / EPOCH}, after)
    assert harsh(script.recipe) == (set() if overrides else {"a", "b"})
    script.one({"a": 10 / EPOCH, "b": 10 / EPOCH}, after)
    assert harsh(script.recipe) == {"a", "b"}


def test_a_rate_that_drops_on_the_last_step_of_an_epoch_does_not_lose_the_epoch() -> None:
    script = Script(recipe())
    script.epoch(w=10)
    script.epoch(w=10)
    for lr in (0.1, 0.1, 0.01):
        script.one({"w": 10 / EPOCH}, lr)
    assert harsh(script.recipe) == set()
    assert script.epoch(lr=0.01, w=10) == {"w"}
    assert script.epoch(lr=0.01, w=1) == set()


def test_smooth_schedules_and_warm_ups_do_not_override() -> None:
    script, total = Script(recipe()), 40 * EPOCH
    script.epoch(w=10)
    script.epoch(w=10)
    for step in range(2 * EPOCH, total - EPOCH):
        warm = min(1.0, step / 20)
        lr = 0.5 * warm * (1 + math.cos(math.pi * step / total))
        assert harsh(script.one({"w": 10 / EPOCH}, lr)) == {"w"}


def test_a_verdict_due_on_a_skipped_step_comes_with_the_next_one() -> None:
    script = Script(recipe())
    script.epoch(w=10)
    script.one({"w": 5.0})
    script.one({"w": 5.0})
    script.step += 1  # not finite: no gradient was agreed on
    assert harsh(script.recipe) == set()
    assert harsh(script.one({"w": 10 / EPOCH})) == {"w"}


def test_skipped_first_steps_leave_nothing_of_an_older_epoch() -> None:
    script = Script(recipe(interval=2))
    script.epoch(w=9)
    script.epoch(w=9)
    script.one({"w": 400.0})
    script.step += 5  # the rest of this epoch, and all of the next
    assert harsh(script.one({"w": 400.0})) == set()  # the late verdict: 400 against 9
    script.one({"w": 0.0})
    script.one({"w": 0.0})
    assert harsh(script.recipe) == {"w"}  # 400 against 400


def test_every_state_entry_is_a_tensor_that_a_checkpoint_can_hold() -> None:
    script = Script(recipe())
    for norm in (10, 10, 4):
        script.epoch(w=norm)
        script.one({"w": 1.0})
        assert all(isinstance(v, Tensor) for v in script.state.values())
        script.step += EPOCH - 1


def test_a_recipe_that_does_not_start_mild_is_refused() -> None:
    with pytest.raises(RecipeError, match="starts with its mild exchange"):
        Recipe(AllReduced(FP32()), ErrorFeedback(), controller=Accordion(MILD, HARSH, EPOCH))


def test_no_control_is_no_control() -> None:
    given = recipe()
    assert Fixed().decide(Facts(1, 0.1, []), given, {}) is given


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"epoch": 0}, "1 step"),
        ({"interval": 0}, "1 epoch"),
        ({"threshold": 0.0}, "positive"),
        ({"drop": 1.0}, "above 1"),
    ],
)
def test_impossible_values_are_refused(options: dict, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        recipe(**options)
    if "drop" not in options:
        with pytest.raises(RecipeError, match=reason):
            AccordionBatch(**{"factor": 2, "epoch": 3, **options})


# -- whole runs -------------------------------------------------------------------------------------------------------

BURSTS = (1.0, 1.0, 0.2, 0.2, 5.0, 5.0)


def bursting(model: torch.nn.Module, rank: int, step: int) -> float:
    """Gradients whose size changes between epochs of two steps, each parameter at a time of its own."""
    for i, p in enumerate(model.parameters()):
        size = BURSTS[((step - 1) // 2 + i) % len(BURSTS)]
        p.grad = size * (0.3 * noise(i, rank, step, numel=p.numel()) + noise(i, numel=p.numel())).view(p.shape)
    return 0.0


RUNS = [
    "gather(topk(ratio=0.9)) + error_feedback() + accordion(gather(topk(ratio=0.9)), gather(topk(ratio=0.1)), 2, interval=1)",
    "accordion(epoch=2, mild=3, harsh=1, interval=1)",
    "accordion_qsgd(epoch=2, interval=1) + bucket(0.00002)",
    "scatter(topk(ratio=0.9)) + error_feedback()"
    " + accordion(scatter(topk(ratio=0.9)), scatter(topk(ratio=0.1)), 2, interval=1)",
]
STEPS = 14


def gradients(recipe: str, size: int, steps: int = STEPS):
    """Trains step by step; yields the replicas after each."""
    ranks = make(recipe, size, optimizer=sgd(0.01, 0.0))
    for _ in range(steps):
        train(ranks, bursting, 1)
        yield ranks


@pytest.mark.parametrize("recipe", RUNS)
def test_decisions_are_equal_on_all_ranks_and_do_change(recipe: str) -> None:
    seen = list[frozenset[str]]()
    for ranks in gradients(recipe, 3):
        assert all(r.worker.recipe == ranks[0].worker.recipe for r in ranks)
        assert all(c.exchange == d.exchange for c, d in zip(ranks[0].worker.buckets, ranks[2].worker.buckets))
        assert bit_equal(parameters(ranks))
        seen.append(frozenset(ranks[0].worker.recipe.routes))
    assert len(set(seen)) >= 3
    assert any(0 < len(s) < 6 for s in seen)


def held_of(ranks: Sequence[Replica], role: str, key: str, name: str) -> list[Tensor]:
    """A parameter's part of one state entry, of each rank that has it."""
    found = (by_name(r.worker.buckets, role, key) for r in ranks)
    return [held[name].double() for held in found if name in held]


def check_sums(recipe: str, size: int, kept_of: Callable[[Sequence[Replica], str], Tensor]) -> None:
    """Sum of means + what is kept = sum of mean gradients, for every parameter, after every step."""
    switches, before = 0, frozenset[str]()
    got: dict[str, Tensor] = {}
    given: dict[str, Tensor] = {}
    for step, ranks in enumerate(gradients(recipe, size), 1):
        for i, (name, p) in enumerate(ranks[0].model.named_parameters()):
            assert p.grad is not None
            got[name] = p.grad.double() + got.get(name, 0.0)
            mine = [make_gradient(i, r, step, p) for r in range(size)]
            given[name] = torch.stack(mine).double().mean(0) + given.get(name, 0.0)
        for name, mean in got.items():
            torch.testing.assert_close(mean + kept_of(ranks, name), given[name], rtol=1e-4, atol=1e-4)
        now = frozenset(ranks[0].worker.recipe.routes)
        switches, before = switches + (now != before), now
    assert switches >= 3


@pytest.mark.parametrize("recipe", [RUNS[0], RUNS[0] + " + bucket(0.00002)", RUNS[3], RUNS[3] + " + bucket(0.00002)"])
def test_nothing_is_lost_on_a_switch(recipe: str) -> None:
    """What is kept is the mean residual, and what owners owe."""

    def kept_of(ranks: Sequence[Replica], name: str) -> Tensor:
        residual = torch.stack(held_of(ranks, "memory", "residual", name)).mean(0)
        return residual + sum(held_of(ranks, "exchange", "owed", name))

    check_sums(recipe, 3, kept_of)


def test_what_owners_owe_without_a_memory_is_paid_on_a_switch() -> None:
    """Messages are exact, so that only the mean's encoding loses something, which its owner adds to the next one."""
    level = "scatter(fp32(), answer=qsgd(bits={}, bucket=16), feedback=1.0)"
    text = f"{level.format(8)} + accordion({level.format(8)}, {level.format(4)}, 2, interval=1) + bucket(0.00002)"

    def kept_of(ranks: Sequence[Replica], name: str) -> Tensor:
        owed = sum(held_of(ranks, "exchange", "owed", name), torch.zeros(()))
        return owed + sum(held_of(ranks, "memory", "arrears", name)) / len(ranks)

    check_sums(text, 3, kept_of)


def make_gradient(i: int, rank: int, step: int, p: Tensor) -> Tensor:
    size = BURSTS[((step - 1) // 2 + i) % len(BURSTS)]
    return size * (0.3 * noise(i, rank, step, numel=p.numel()) + noise(i, numel=p.numel())).view(p.shape)


def test_diana_keeps_what_it_learned_and_its_balance_on_a_switch() -> None:
    level = "scatter(qsgd(bits={}, bucket=16))"
    text = f"{level.format(8)} + diana() + accordion({level.format(8)}, {level.format(4)}, 2, interval=1)"
    size = 3
    for ranks in gradients(text, size):
        own = [by_name(r.worker.buckets, "memory", "own") for r in ranks]
        common = by_name(ranks[0].worker.buckets, "memory", "common")
        owed = [by_name(r.worker.buckets, "exchange", "owed") for r in ranks]
        for name in common:
            mean = torch.stack([o[name].double() for o in own]).mean(0)
            owing = sum((o[name].double() for o in owed if name in o), torch.zeros(()))
            torch.testing.assert_close(mean, common[name].double() + owing, rtol=1e-4, atol=1e-4)


def test_warm_starts_survive_a_switch() -> None:
    ranks = make(RUNS[1], 2, optimizer=sgd(0.01, 0.0))

    def starts() -> dict[str, Tensor]:
        worker = ranks[0].worker
        return {k: v.clone() for c in worker.buckets for k, v in c.states["exchange"].items() if k[:2] == "q:"}

    ranks_seen, switched = set[int](), False
    for _ in range(STEPS):
        before, old = ranks[0].worker.recipe, starts()
        train(ranks, bursting, 1)
        if ranks[0].worker.recipe != before:
            switched = True
        assert starts().keys() >= old.keys()
        assert all(q.any() for q in starts().values())
        ranks_seen.add(starts()["q:matrix"].shape[0])
    assert switched
    assert ranks_seen == {1, 3}


@pytest.mark.parametrize("recipe", RUNS)
@pytest.mark.parametrize("stop", [1, 3, 4, 5, 7])
def test_resuming_within_an_interval_reproduces_the_decisions(recipe: str, stop: int) -> None:
    def decisions(ranks, steps: int) -> list[Recipe]:
        out = list[Recipe]()
        for _ in range(steps):
            train(ranks, bursting, 1)
            out.append(ranks[0].worker.recipe)
        return out

    slow = sgd(0.01, 0.0)
    whole, ranks = make(recipe, 2, optimizer=slow), make(recipe, 2, optimizer=slow)
    expected = decisions(whole, STEPS)
    decisions(ranks, stop)
    again = resumed(recipe, saved(ranks), optimizer=slow)
    assert decisions(again, STEPS - stop) == expected[stop:]
    assert all(bit_equal(pair) for pair in zip(parameters(whole), parameters(again)))


def test_a_spoilt_step_at_the_end_of_an_epoch_only_delays_the_verdict() -> None:
    ranks = make("accordion_qsgd(epoch=2, interval=1, threshold=0.9)", 2)
    train(ranks, spoiled([(1, 4)], math.nan), 4)
    assert not ranks[0].worker.recipe.routes
    train(ranks, pull, 1)
    assert ranks[0].worker.recipe.routes
    assert ranks[0].worker.recipe == ranks[1].worker.recipe


@pytest.mark.parametrize("schedule", ["local_sgd(3)", "slowmo(3)", "overlap_local_sgd(3)"])
def test_rounds_that_do_not_divide_an_epoch_are_judged_all_the_same(schedule: str) -> None:
    ranks = make(f"accordion_qsgd(epoch=4, interval=1, threshold=10.0) + {schedule}", 2)
    train(ranks, pull, 24)
    assert ranks[0].worker.recipe.routes
    assert ranks[0].worker.recipe == ranks[1].worker.recipe


# -- the batch --------------------------------------------------------------------------------------------------------


def batch(script: Script) -> tuple[int, float]:
    return script.recipe.schedule.shape.micro_batches, script.recipe.schedule.shape.lr_factor


def batched(**options) -> Recipe:
    return Recipe(
        AllReduced(FP32()), controller=AccordionBatch(**{"factor": 8, "epoch": EPOCH, "interval": 1, **options})
    )


def test_a_parameter_without_gradients_does_not_hold_back_the_batch() -> None:
    for per in ("model", "parameter"):
        script = Script(batched(per=per))
        assert [run_batch(script, a=1, frozen=0) for _ in range(2)] == [(1, 1.0), (8, 8.0)]
    script = Script(batched(per="parameter"))
    assert [run_batch(script, a=1, thawed=t) for t in (0, 5, 5)] == [(1, 1.0), (1, 1.0), (8, 8.0)]


def run_batch(script: Script, lr: float = 0.1, **norms: float) -> tuple[int, float]:
    for _ in range(EPOCH):
        script.one({name: norm / EPOCH for name, norm in norms.items()}, lr)
    return batch(script)


def test_one_parameter_that_is_critical_does_not_hold_back_the_batch_of_all() -> None:
    """A bias whose small gradient halves at every check, beside a matrix that stays."""
    grown = dict[str, int]()
    for per in ("model", "parameter"):
        script = Script(batched(per=per))
        seen = [run_batch(script, matrix=10, bias=0.5**check) for check in range(5)]
        grown[per] = seen.index((8, 8.0)) if (8, 8.0) in seen else -1
    assert grown == {"model": 1, "parameter": -1}
    script = Script(batched())
    assert [run_batch(script, matrix=m, bias=1) for m in (10, 4, 4)] == [(1, 1.0), (1, 1.0), (8, 8.0)]


def test_the_batch_grows_once_nothing_is_critical_and_never_shrinks() -> None:
    script = Script(batched(per="parameter"))
    seen = [run_batch(script, a=a, b=b) for a, b in ((10, 10), (10, 1), (1, 1), (1, 1), (9, 9), (1, 1))]
    assert seen == [(1, 1.0)] * 3 + [(8, 8.0)] * 3
    assert run_batch(script, lr=0.001, a=5, b=5) == (8, 8.0)  # not at a drop of the rate either


@pytest.mark.parametrize(("schedule", "first"), [("", 0.5), (" + every_step(rate=0.5)", 0.25)])
def test_the_rate_grows_at_the_same_step_as_the_batch(schedule: str, first: float) -> None:
    def downhill(model: torch.nn.Module, rank: int, step: int) -> float:
        calls.append((rank, step))
        x = model.get_parameter("x")
        x.grad = torch.ones_like(x)
        return 0.0

    calls = list[tuple[int, int]]()
    ranks = make(f"accordion_batch(epoch=2, factor=4, interval=1){schedule}", 2, lambda: Flat(3), sgd(0.5, 0.0))
    moved = list[float]()
    for _ in range(8):
        before = parameters(ranks)[0]
        train(ranks, downhill, 1)
        moved.append(float((before - parameters(ranks)[0])[0]))
    assert moved == [first] * 4 + [4 * first] * 4
    assert [calls.count((0, step)) for step in range(1, 9)] == [1] * 4 + [4] * 4
    assert ranks[0].optimizer.param_groups[0]["lr"] == 0.5


def test_a_batch_of_two_micro_batches_grows_too_and_the_rate_by_as_much_from_its_own() -> None:
    def downhill(model: torch.nn.Module, rank: int, step: int) -> float:
        x = model.get_parameter("x")
        x.grad = torch.ones_like(x)
        return 0.0

    recipe = "allreduce + every_step(micro_batches=2, rate=0.5) + accordion_batch(8, 2, interval=1)"
    ranks = make(recipe, 2, lambda: Flat(3), sgd(0.5, 0.0))
    moved = list[float]()
    for _ in range(6):
        before = parameters(ranks)[0]
        train(ranks, downhill, 1)
        moved.append(float((before - parameters(ranks)[0])[0]))
    assert moved == [0.25] * 4 + [1.0] * 2
    assert ranks[0].worker.recipe.schedule.shape.micro_batches == 8


def test_micro_batches_are_averaged() -> None:
    drawn = iter(range(100))

    def fresh(model: torch.nn.Module, rank: int, step: int) -> float:
        x, value = model.get_parameter("x"), float(next(drawn))
        x.grad = torch.full_like(x, value)
        return value

    ranks = make("allreduce + every_step(micro_batches=4)", 1, lambda: Flat(3), sgd(1.0, 0.0))
    before = parameters(ranks)[0]
    train(ranks, fresh, 1)
    assert ranks[0].losses == [1.5]
    torch.testing.assert_close(before - parameters(ranks)[0], torch.full((3,), 1.5, dtype=torch.float64))


def test_growing_the_batch_keeps_memories_and_resumes() -> None:
    text = "topk(ratio=0.1) + accordion_batch(4, 2, interval=1, threshold=10.0)"
    ranks = make(text, 2)
    train(ranks, pull, 3)
    grown: Sequence[bool] = []
    for _ in range(4):
        old = by_name(ranks[0].worker.buckets, "memory", "residual")
        buckets = ranks[0].worker.buckets
        train(ranks, pull, 1)
        grown = [*grown, ranks[0].worker.recipe.schedule.shape.micro_batches == 4]
        assert ranks[0].worker.buckets is buckets
        assert old.keys() == by_name(ranks[0].worker.buckets, "memory", "residual").keys()
    assert grown == [True] * 4
    again = resumed(text, saved(ranks))
    assert again[1].worker.recipe == ranks[1].worker.recipe
    train(ranks, pull, 3)
    train(again, pull, 3)
    assert all(bit_equal(pair) for pair in zip(parameters(ranks), parameters(again)))


@pytest.mark.parametrize("size", [1, 3])
def test_a_factor_of_one_is_no_control(size: int) -> None:
    one, none = make("accordion_batch(epoch=2, factor=1, interval=1)", size), make("allreduce", size)
    train(one, pull, 8)
    train(none, pull, 8)
    assert all(bit_equal(pair) for pair in zip(parameters(one), parameters(none)))
