"""auto among recipes with rules and with rounds of local steps, in the simulator."""

from itertools import permutations
from pathlib import Path

import pytest
import torch
from tests.controllers.test_auto import FAST, SLOW, Square, alike, equal, make, pulled, resumed, sgd, words
from torch import nn

from gossamer.controllers.auto_candidates import window_of
from gossamer.controllers.auto_replay import model_of
from gossamer.controllers.auto_table import ALLOWED
from gossamer.core.bucket import Bucket, Layout
from gossamer.core.errors import RecipeError
from gossamer.core.version import __version__
from gossamer.recipe import Recipe
from gossamer.runtime.step_times import _runs
from gossamer.schedules import EveryStep, LocalSGD, SlowMo
from gossamer.simulate import Replica, replicas, train

ROUNDS = "scatter(qsgd()) + local_sgd(8)"
TERNARY = "terngrad(last='qsgd')"
DENSE = "allreduce(fp32())"


class Predicts(nn.Module):
    """A matrix and a last layer that is one."""

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.body = nn.Parameter(torch.randn(32, 32, generator=rng, dtype=torch.float32))
        self.head = nn.Parameter(torch.randn(4, 32, generator=rng, dtype=torch.float32))


def parts(ranks: list[Replica]) -> tuple[str, str, int]:
    """Exchange, schedule and the number of rules in force, the same on all ranks."""
    (found,) = {
        (repr(r.worker.recipe.exchange), repr(r.worker.recipe.schedule), len(r.worker.recipe.rules)) for r in ranks
    }
    return found


def test_rounds_that_the_user_names_are_tried_for_whole_rounds_and_left_again_on_a_fast_network() -> None:
    ranks = make(f"auto(allow=('qsgd', '{ROUNDS}'))", 2)
    run = train(ranks, pulled, 112, SLOW, alike)
    assert parts(ranks) == ("scatter(qsgd())", "local_sgd(8)", 0)
    assert equal(ranks)  # 112 is the end of a round
    assert f"auto tries {ROUNDS} from step 4" in words(run)
    assert "auto tries dense from step 49" in words(run)  # the round of one step, and five whole ones
    said = words(run)[-1]
    assert said.startswith(f"auto: {ROUNDS} from step 60: ")
    same = "allreduce + switch_exchange(59, scatter(qsgd()), schedule=local_sgd(8))"
    assert said.endswith(f"; qsgd 129 ms; as '{same}'. Allowed: qsgd, {ROUNDS}")
    assert words(run, 1) == words(run)
    measured, guess = float(said.split()[7]), float(said.split("predicted ")[1].split()[0])
    assert guess == pytest.approx(measured, rel=0.05)
    train(ranks, pulled, 300, FAST, alike)
    assert parts(ranks) == (DENSE, "every_step()", 0)
    for _ in range(3):
        assert equal(ranks)
        train(ranks, pulled, 1, FAST, alike)


def test_rounds_are_watched_where_computing_takes_no_time() -> None:
    ranks = make(f"auto(allow=('{ROUNDS}',))", 2)
    train(ranks, pulled, 200, SLOW)
    assert parts(ranks) == ("scatter(qsgd())", "local_sgd(8)", 0)


def test_a_candidate_with_a_rule_is_chosen_and_its_rule_holds() -> None:
    ranks = replicas(f'auto(allow=("{TERNARY}",))', Predicts, sgd, 2)
    run = train(ranks, pulled, 40, SLOW, alike)
    assert parts(ranks) == ("scatter(ternary(), answer=qsgd(bits=3))", "every_step()", 1)
    assert equal(ranks)
    assert [c.names for c in ranks[0].worker.buckets] == [["head"], ["body"]]
    assert words(run)[-1].startswith(f"auto: {TERNARY} from step 13: ")
    (change,) = {d.decision for d in run.ledger.decisions if d.step == 4} - {*words(run)}
    assert change == (
        """rule("name == 'head'", scatter(qsgd())), scatter(ternary(), answer=qsgd(bits=3)) for all others"""
    )


def test_rounds_may_follow_on_dense_first_steps_without_measuring() -> None:
    ranks = replicas("allreduce + switch_exchange(5, scatter(qsgd()), schedule=local_sgd(4))", Predicts, sgd, 2)
    for step in range(1, 17):
        train(ranks, pulled, 1)
        assert equal(ranks) == (step <= 5 or step % 4 == 0)
    assert parts(ranks) == ("scatter(qsgd())", "local_sgd(4)", 0)
    with pytest.raises(RecipeError, match="under gossip"):
        Recipe.of("allreduce + switch_exchange(5, allreduce(fp32()), schedule=gossip())")


def test_candidates_with_rules_are_measured_on_views_of_the_one_copy() -> None:
    ranks = replicas("allreduce", Predicts, sgd, 2)
    (bucket,) = ranks[0].worker.buckets
    copy = torch.zeros(bucket.layout.numel, dtype=torch.float32)
    recipe = Recipe.of(TERNARY).bound({"body": (32, 32), "head": (4, 32)})
    runs = [block for _, block in _runs(recipe, bucket, Bucket(copy, bucket.layout))]
    assert [(block.name, block.numel) for block in runs] == [("head", 128), ("body", 1024)]
    assert all(block.flat.untyped_storage().data_ptr() == copy.untyped_storage().data_ptr() for block in runs)


class Layers(nn.Module):
    """Two layers: a matrix and a vector each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)


def test_parameters_that_go_one_way_are_measured_as_one_block_wherever_they_stand() -> None:
    """As they are sent: a run for each stretch of them would count what each run takes besides its numbers."""
    ranks = replicas("auto(allow=('qsgd',))", Layers, sgd, 2)
    (bucket,) = ranks[0].worker.buckets
    copy = Bucket(torch.arange(144.0, dtype=torch.float32), Layout(bucket.layout.segments, bucket.layout.dtype))
    recipe = Recipe.of("scatter(qsgd()) + rule('ndim < 2', allreduce(fp32()))")
    runs = [block for _, block in _runs(recipe, bucket, copy)]
    assert sorted(block.numel for block in runs) == [16, 128]
    assert torch.equal(torch.cat([block.flat for block in runs]), copy.flat)
    worker = ranks[0].worker
    _, requests = worker.controller.times._driven(recipe, 0, copy, worker.context(0))
    assert requests == 1.5  # two of a scatter, one of an all-reduce


def test_losses_of_all_steps_of_a_round_are_heard() -> None:
    def told(model: nn.Module, rank: int, step: int) -> float:
        pulled(model, rank, step)
        return float(step)

    ranks = make(f"auto(allow=('qsgd', '{ROUNDS}'))", 2)
    train(ranks, told, 104, SLOW, alike)
    assert parts(ranks) == ("scatter(qsgd())", "local_sgd(8)", 0)
    # Rounds that end at steps 72 to 104; of each the eight steps before its last average is waited for.
    assert ranks[0].worker.controller.state["after"].tolist() == [step - 4.5 for step in range(72, 105, 8)]


def test_the_default_list_holds_a_recipe_for_the_last_layer_where_that_is_a_matrix() -> None:
    allowed = {}
    for model in (Square, Predicts):
        controller = replicas("auto", model, sgd, 2)[0].worker.recipe.controller
        allowed[model] = controller.allow  # type: ignore[attr-defined]
    assert allowed == {Square: ("bf16", "int8", "qsgd"), Predicts: ("bf16", "int8", "qsgd", TERNARY)}


@pytest.mark.parametrize("schedule", [LocalSGD(8), LocalSGD(8, warmup=20), SlowMo(12), LocalSGD(1)])
def test_a_window_under_rounds_is_one_of_whole_rounds(schedule: LocalSGD | SlowMo) -> None:
    for step in range(1, 60):
        rows, last = window_of(schedule, step, 8, 9)
        ends = [s for s in range(step + 1, last + 1) if schedule.is_synced(s)]
        assert last == ends[-1]
        assert len(ends) == rows + 1 >= 6
        assert last >= step + 9
    assert window_of(EveryStep(), 20, 8, 9) == (8, 29)


def test_a_run_too_short_for_trials_of_whole_rounds_stays_dense_and_says_so() -> None:
    run = train(make(f"auto(allow=('{ROUNDS}',), steps=180)", 2), pulled, 2, SLOW, alike)
    assert words(run)[-1].endswith("180 steps are no more than the 180 that measuring and trials may take")
    assert len(words(train(make(f"auto(allow=('{ROUNDS}',), steps=181)", 2), pulled, 2, SLOW, alike))) == 1


# -- changes at every step, and what is owed ------------------------------------------------------------------------------

EACH = ["bf16", "int8", "qsgd", TERNARY, "topk", "scatter(qsgd()) + local_sgd(2)", "allreduce + slowmo(4)"]
THERE, BACK, AGAIN, STEPS = 4, 8, 12, 16


def made_up(path: Path, name: str, other: str = "dense") -> str:
    """The ledger of a run that put a recipe in force twice, and another one between."""
    said = [
        f"auto begins: model {model_of({'body': (32, 32), 'head': (4, 32)})}, 2 ranks, gossamer {__version__}.",
        f"auto tries {name} from step {THERE + 1}",
        f"auto tries {other} from step {BACK + 1}",
        f"auto: {name} from step {AGAIN + 1}: 1 ms a step",
    ]
    lines = [f'{{"step": 1, "rank": 0, "decision": "{text}"}}' for text in said]
    path.write_text("\n".join(lines))
    allow = "".join(f'"{each}", ' for each in (name, other) if each != "dense")
    return f"auto(allow=({allow}), replay={str(path)!r})"


@pytest.mark.parametrize("name", EACH)
def test_a_run_that_is_cut_off_at_any_step_of_a_change_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    recipe = made_up(tmp_path / "ledger.jsonl", name)
    whole, cuts = replicas(recipe, Predicts, sgd, 2), dict[int, list[Replica]]()
    for step in range(1, STEPS + 1):
        train(whole, pulled, 1)
        synced = whole[0].worker.recipe.is_synced(step)
        assert equal(whole) or not synced, step
        if THERE - 1 <= step <= AGAIN + 2:
            cuts[step] = resumed(whole, 2, Predicts)
    for step, ranks in cuts.items():
        train(ranks, pulled, STEPS - step)
        assert all(torch.equal(a.flat(), b.flat()) for a, b in zip(whole, ranks, strict=True)), step


@pytest.mark.parametrize(("one", "other"), [*permutations(ALLOWED, 2)])
def test_of_all_recipes_that_it_may_choose_one_follows_on_another_and_back(
    one: str, other: str, tmp_path: Path
) -> None:
    """At once, without dense steps between the two, since neither owes anything."""
    ranks = replicas(made_up(tmp_path / "ledger.jsonl", one, other), Predicts, sgd, 2)
    expected = {name: parts(replicas(name, Predicts, sgd, 2)) for name in (one, other)}
    for step in range(1, STEPS + 1):
        if step > THERE:
            assert parts(ranks) == expected[other if BACK < step <= AGAIN else one], step
        train(ranks, pulled, 1)
        assert equal(ranks), step
        assert not any(r.worker.residual_norm() for r in ranks), step


def test_slow_momentum_that_comes_in_force_again_begins_from_the_present_model(tmp_path: Path) -> None:
    ranks = replicas(made_up(tmp_path / "ledger.jsonl", "allreduce + slowmo(4)"), Predicts, sgd, 2)
    train(ranks, pulled, AGAIN)
    assert not any(bucket.states["schedule"] for r in ranks for bucket in r.worker.buckets)
    before = [p.detach().clone() for p in ranks[0].model.parameters()]
    train(ranks, pulled, 1)
    anchors = {s.name: b for b in ranks[0].worker.buckets for s in b.layout.segments}
    for (name, _), x in zip(ranks[0].model.named_parameters(), before, strict=True):
        bucket = anchors[name]
        views = dict(
            zip(bucket.names, bucket.states["schedule"]["anchor"].split([s.numel for s in bucket.layout.segments]))
        )
        assert torch.equal(views[name].view_as(x), x)


def test_a_ledger_that_was_changed_by_hand_so_that_debts_would_be_lost_is_refused(tmp_path: Path) -> None:
    made_up(tmp_path / "ledger.jsonl", "topk")
    text = (tmp_path / "ledger.jsonl").read_text()
    (tmp_path / "ledger.jsonl").write_text(text.replace("tries dense", f"tries {ROUNDS}"))
    with pytest.raises(RecipeError, match="auto returns to dense between the two"):
        Recipe.of(f"auto(allow=('topk', '{ROUNDS}'), replay={str(tmp_path / 'ledger.jsonl')!r})")
