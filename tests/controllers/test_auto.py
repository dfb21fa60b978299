"""auto in the simulator, where time is virtual and exact."""

import gc
import json
import re
from collections.abc import Callable, Generator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from gossamer.checkpoints import state as checkpoints
from gossamer.controllers import auto_search
from gossamer.controllers.auto import Auto
from gossamer.controllers.auto_choice import predicted
from gossamer.controllers.auto_replay import head
from gossamer.controllers.auto_search import AutoSearch
from gossamer.controllers.auto_state import AutoState
from gossamer.controllers.auto_watch import TRIES, AutoOptions
from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import CandidateCost, Facts, RankTimes
from gossamer.core.contracts.times import NUMBERS
from gossamer.core.errors import AttachError, RecipeError
from gossamer.core.programs import through
from gossamer.core.verbs import Now, Program, Start, Verb
from gossamer.costs import quantities
from gossamer.fabrics.links import Network
from gossamer.integrations.checks.devices import refuse_lengths
from gossamer.recipe import Recipe
from gossamer.runtime import step_times
from gossamer.runtime.step_times import StepTimes
from gossamer.simulate import Replica, Trained, replicas, train

# Four bytes of 1,056 numbers: dense takes 3 s, .3 s, .06 s, and nothing.
SLOWEST, SLOW, FASTER, FAST = (Network(1e-4, rate) for rate in (2e3, 2e4, 1e5, 1e8))
COMPUTING = 0.1
CHOSEN = 60  # steps after which it has chosen


class Square(nn.Module):
    """Two blocks: a matrix and a vector."""

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(32, 32, generator=rng, dtype=torch.float32))
        self.vector = nn.Parameter(torch.randn(32, generator=rng, dtype=torch.float32))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def pulled(model: nn.Module, rank: int, step: int) -> float:
    """Towards zero, with noise that follows from rank and step."""
    parameters = [*model.parameters()]
    (winds, error), loss = _noise(rank, step, tuple(p.shape for p in parameters)), 0.0
    for p, wind in zip(parameters, winds, strict=True):
        p.grad = p.detach() + wind
        loss += 0.5 * float(p.detach().square().mean())
    return loss + error


@cache  # runs of all tests are pulled alike
def _noise(rank: int, step: int, shapes: tuple[torch.Size, ...]) -> tuple[list[Tensor], float]:
    rng = torch.Generator().manual_seed(1000 * rank + step)
    winds = [0.1 * torch.randn(shape, generator=rng) for shape in shapes]
    return winds, 0.02 * float(torch.randn((), generator=rng))


def alike(rank: int, step: int) -> float:
    return COMPUTING


def make(recipe: str = "auto", size: int = 4) -> list[Replica]:
    return replicas(recipe, Square, sgd, size)


def words(run: Trained, rank: int = 0) -> list[str]:
    return [d.decision for d in run.ledger.decisions if d.rank == rank and d.decision.startswith("auto")]


def equal(ranks: list[Replica]) -> bool:
    return all(torch.equal(r.flat(), ranks[0].flat()) for r in ranks)


def exchange(ranks: list[Replica]) -> str:
    (found,) = {repr(r.worker.recipe.exchange) for r in ranks}
    return found


@cache
def settled() -> tuple[list[Replica], Trained]:
    """A run that has chosen, at which some look and which none changes."""
    ranks = make()
    return ranks, train(ranks, pulled, CHOSEN, SLOW, alike)


@cache
def gone_on() -> list[Replica]:
    """The ranks of one that has gone on since, from which others are resumed."""
    ranks = make()
    train(ranks, pulled, 100, SLOW, alike)
    return ranks


def test_on_a_slow_network_it_chooses_what_is_fastest_and_says_so() -> None:
    ranks, run = settled()
    assert exchange(ranks) == "scatter(qsgd(bucket=128))"
    assert equal(ranks)
    *_, word = words(run)
    assert word.startswith("auto: qsgd from step 18: ")
    assert "dense (predicted " in word
    assert "; int8 " in word
    assert word.endswith("; as 'allreduce + switch_exchange(17, scatter(qsgd(bucket=128)))'. Allowed: bf16, int8, qsgd")
    assert all(words(run, rank) == words(run) for rank in range(4))


def test_dense_is_not_timed_beside_who_is_slower_than_another_candidate() -> None:
    """Here `qsgd` takes .11 s and dense .17, clearly longer; `int8`, which is second, takes .12, and four steps of it suffice."""
    run = train(make(), pulled, CHOSEN, Network(1e-4, 8.8e4), alike)
    tries = [word for word in words(run) if "tries" in word]
    assert tries == ["auto tries qsgd from step 5", "auto tries int8 from step 14"]
    assert words(run)[-1].startswith("auto: qsgd from step 19: ")


def test_the_prediction_is_what_the_simulator_does_where_processors_cost_nothing() -> None:
    _, run = settled()
    said = words(run)[-1].replace("(", "").split()
    measured, guess = float(said[5]), float(said[said.index("predicted") + 1])
    assert guess == pytest.approx(measured, rel=0.05)


def test_where_dense_is_best_no_trial_is_paid_for() -> None:
    ranks, dense = make(), make("allreduce")
    run = train(ranks, pulled, 120, FAST, alike)
    train(dense, pulled, 120, FAST, alike)
    assert [w for w in words(run) if "tries" in w] == []
    assert words(run)[-1].startswith("auto: dense is best here: it waits ")
    assert "Allowed: bf16, int8, qsgd" in words(run)[-1]
    assert all(torch.equal(a.flat(), b.flat()) for a, b in zip(ranks, dense))


def test_a_step_at_which_nothing_is_measured_makes_no_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for several times in each step."""
    recipe = Recipe.of("auto").bound({"matrix": (32, 32), "vector": (32,)})
    chosen = {key: torch.tensor(value) for key, value in {"phase": 2.0, "until": 100.0, "choice": 2.0}.items()}
    recipe.controller.due(60, recipe, chosen)
    monkeypatch.setattr(Auto, "_put", None)
    assert not recipe.controller.due(60, recipe, chosen).candidates


def test_measuring_and_trials_take_sixty_steps_at_most() -> None:
    """Where dense is not far slower it is timed for longer, and beside each trial; where a trial disagrees with the prediction it
    is made once more: ranks compute for longer during trials, and most during the first.
    """
    run = train(make(), pulled, CHOSEN, SLOW, lambda rank, step: 1.0 if step < 16 else 1.5 if step < 25 else 1.35)
    tries = [word.removeprefix("auto tries ") for word in words(run) if "tries" in word]
    steps = [f"{what} from step {16 + 9 * i}" for i, what in enumerate(("qsgd", "dense", "int8", "dense", "int8"))]
    assert tries == steps
    assert words(run)[-1].startswith("auto: int8 from step 61: ")


def test_a_second_candidate_whose_four_steps_take_longer_than_the_first_took_is_given_up() -> None:
    """Dense is not timed beside it. If but one of the four does not, its trial has all steps."""
    slower = train(make(), pulled, CHOSEN, SLOW, lambda rank, step: 1.0)
    tries = [word.removeprefix("auto tries ") for word in words(slower) if "tries" in word]
    assert tries == ["qsgd from step 16", "dense from step 25", "int8 from step 34"]
    assert words(slower)[-1].startswith("auto: qsgd from step 39: ")
    quicker = train(make(), pulled, CHOSEN, SLOW, lambda rank, step: 0.8 if step == 35 else 1.0)
    assert "auto: qsgd from step 52: " in words(quicker)[-1]


def test_a_gain_that_the_trial_does_not_show_is_refused() -> None:
    ranks = make()
    train(ranks, pulled, 4, Network(1e-4, 1e4), alike)  # the prediction says qsgd, and then there is nothing to gain
    run = train(ranks, pulled, 60, FAST, alike)
    assert exchange(ranks) == "allreduce(fp32())"
    (said,) = (w for w in words(run) if w.startswith("auto: dense is best here") and "(predicted " in w)
    waits, took = map(quantities.seconds, re.findall(r"it waits (\S+ \w+) of (\S+ \w+);", said)[0])
    assert waits < took


@pytest.mark.parametrize(("before", "again"), [(TRIES - 1, True), (TRIES, False)])
def test_it_measures_again_ten_times_at_most(before: int, again: bool) -> None:
    ranks = make()
    train(ranks, pulled, 300, FAST, alike)
    for rank in ranks:
        AutoState(rank.worker.controller.state).write("tries", before)
    run = train(ranks, pulled, 250, SLOW, alike)
    assert ("auto measures again: other times" in words(run)) == again
    assert (exchange(ranks) == "allreduce(fp32())") != again


@pytest.mark.parametrize(("network", "times_dense"), [(SLOW, True), (SLOWEST, False)])
def test_a_trial_that_is_quicker_than_predicted_needs_no_dense_steps_if_dense_would_be_slower_all_the_same(
    network: Network, times_dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_much(*args: Any, **kwargs: Any) -> list[float]:
        dense, *candidates = predicted(*args, **kwargs)
        return [dense, *(2 * seconds for seconds in candidates)]

    monkeypatch.setattr(auto_search, "predicted", too_much)
    ranks = make("auto(allow=('qsgd',))")
    run = train(ranks, pulled, CHOSEN, network, alike)
    assert any(w.startswith("auto tries dense") for w in words(run)) == times_dense
    assert exchange(ranks) == "scatter(qsgd(bucket=128))"


def test_dense_is_timed_for_one_step_less_where_it_takes_twice_as_long() -> None:
    """In the first network it takes .42 s and `qsgd` .15, in the second .2 and .12."""
    networks = SLOW, Network(1e-4, 6e4)
    firsts = [next(w for w in words(train(make(), pulled, 8, network, alike)) if "tries" in w) for network in networks]
    assert firsts == ["auto tries qsgd from step 4", "auto tries qsgd from step 5"]


LIES: dict[str, Callable[[float, int], float]] = {
    "zero": lambda clock, call: 0.0,
    "negative": lambda clock, call: -clock,
    "a million": lambda clock, call: 1e6 * call,
    "nan": lambda clock, call: float("nan"),
    "infinite": lambda clock, call: float("inf"),
}


def lying(program: Program[Any], lie: Callable[[float, int], float]) -> Program[Any]:
    """A rank's program, and all that it starts, with a clock that lies."""
    calls = 0

    def ask(verb: Verb) -> Generator[Any, Any, Any]:
        nonlocal calls
        if isinstance(verb, Start):
            return (yield Start(lying(verb.program, lie), verb.label, verb.step, verb.lane))
        answer = yield verb
        calls += isinstance(verb, Now)
        return lie(answer, calls) if isinstance(verb, Now) else answer

    return through(program, ask)


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_all_ranks_are_alike_under_a_clock_that_lies_on_one(lie: Callable[[float, int], float]) -> None:
    ranks = make()
    run = train(ranks, pulled, 120, SLOW, alike, lambda rank, program: lying(program, lie) if rank == 1 else program)
    assert exchange(ranks) == "allreduce(fp32())"
    assert equal(ranks)
    assert all(words(run, rank) == words(run) for rank in range(4))


# -- guards ---------------------------------------------------------------------------------------------------------------


# -- checkpoints and replays ----------------------------------------------------------------------------------------------


def saved(ranks: list[Replica]) -> list[dict[str, Any]]:
    return [checkpoints.save(r.worker) for r in ranks]


def resumed(before: list[Replica], size: int = 4, model: Callable[[], nn.Module] = Square) -> list[Replica]:
    """New ranks with all that a checkpoint of the old ones holds."""
    after, states = replicas(repr(before[0].worker.origin), model, sgd, size), saved(before)
    for i, rank in enumerate(after):
        rank.model.load_state_dict(before[min(i, len(before) - 1)].model.state_dict())
        checkpoints.load(rank.worker, states if size != len(before) else states[i])
    return after


def test_a_run_that_resumes_keeps_its_choice() -> None:
    again = resumed(gone_on())
    run = train(again, pulled, 200, SLOW, alike)
    assert exchange(again) == "scatter(qsgd(bucket=128))"
    assert equal(again)
    assert words(run) == []


def test_in_a_world_of_another_size_it_measures_anew() -> None:
    again = resumed(gone_on(), size=3)
    assert exchange(again) == "scatter(qsgd(bucket=128))"
    run = train(again, pulled, 150, SLOW, alike)
    assert "auto measures again: another world or machine" in words(run)
    assert exchange(again) == "scatter(qsgd(bucket=128))"
    assert equal(again)


def test_on_another_machine_it_measures_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    again = resumed(gone_on())
    monkeypatch.setattr(step_times.platform, "node", lambda: "elsewhere")
    run = train(again, pulled, 150, SLOW, alike)
    assert "auto measures again: another world or machine" in words(run)
    assert exchange(again) == "scatter(qsgd(bucket=128))"
    assert equal(again)


@pytest.mark.parametrize(
    ("computing", "at"), [*((COMPUTING, at) for at in (2, 3, 8, 12, 14)), *((1.0, at) for at in (10, 15, 20, 24, 33))]
)
def test_a_run_that_is_cut_off_while_it_measures_goes_on_to_a_choice(computing: float, at: int) -> None:
    """Where dense is far slower trials begin after step 3 and 12, else after step 15, 24 and 33."""

    def each(rank: int, step: int) -> float:
        return computing

    ranks = make()
    run = train(ranks, pulled, at, SLOW, each)
    assert [w for w in words(run) if w.startswith("auto: ")] == []  # it has not chosen yet
    again = resumed(ranks)
    train(again, pulled, 100 - at, SLOW, each)
    assert exchange(again) == "scatter(qsgd(bucket=128))"
    assert equal(again)


def test_a_trial_that_goes_on_in_another_world_is_not_compared_with_dense_steps_of_the_old_one() -> None:
    ranks = make()
    run = train(ranks, pulled, 9, SLOW, alike)
    assert words(run)[-1] == "auto tries qsgd from step 4"
    again = resumed(ranks, size=3)
    run = train(again, pulled, 60, SLOW, alike)
    assert words(run)[:2] == ["auto measures again: another world or machine", "auto tries dense from step 13"]
    assert exchange(again) == "scatter(qsgd(bucket=128))"
    assert equal(again)


def test_a_candidate_that_was_measured_before_a_run_was_cut_off_is_measured_again() -> None:
    """In step 5, of the 15 in which it measures here."""

    def each(rank: int, step: int) -> float:
        return 1.0

    ranks = make("auto(allow=('qsgd', 'bf16', 'int8'))")
    train(ranks, pulled, 6, SLOW, each)
    again = resumed(ranks)
    train(again, pulled, 94, SLOW, each)
    assert exchange(again) == "scatter(qsgd(bucket=128))"


def written(tmp_path: Path) -> tuple[str, list[Replica]]:
    ranks, run = settled()
    run.ledger.write(tmp_path / "ledger.jsonl")
    return str(tmp_path / "ledger.jsonl"), ranks


def test_a_replay_is_bit_equal_on_another_network_and_from_any_step_of_a_change(tmp_path: Path) -> None:
    path, ranks = written(tmp_path)
    again = make(f"auto(replay={path!r})")
    train(again, pulled, CHOSEN, FAST, alike)
    assert all(torch.equal(a.flat(), b.flat()) for a, b in zip(ranks, again))
    for at in (4, 5, 13, 14, 22, 23):
        cut = make(f"auto(replay={path!r})")
        train(cut, pulled, at, FAST, alike)
        on = resumed(cut)
        train(on, pulled, CHOSEN - at, FAST, alike)
        assert all(torch.equal(a.flat(), b.flat()) for a, b in zip(ranks, on)), at


def test_a_replay_of_another_model_world_or_version_is_refused(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    text = f"auto(replay={path!r})"
    with pytest.raises(AttachError, match="is of a run of 4 ranks, and here are 3"):
        make(text, 3)
    with pytest.raises(AttachError, match="is of a run of another model"):
        replicas(text, partial(nn.Linear, 2, 2), sgd, 4)
    with pytest.raises(RecipeError, match="put qsgd in force, which `allow` does not name"):
        make(f"auto(allow=('bf16', 'int8'), replay={path!r})")
    Path(path).write_text(Path(path).read_text().replace("gossamer 0", "gossamer 9"))
    with pytest.raises(RecipeError, match=r"was written by gossamer 9\S+, and this is "):
        make(text)
    Path(path).write_text(json.dumps({"step": 1, "rank": 0, "decision": "something else"}))
    with pytest.raises(RecipeError, match="holds no run under auto"):
        make(text)
    with pytest.raises(RecipeError, match="cannot be read: No such file or directory; give the file"):
        make(f"auto(replay={path + '.gone'!r})")
    Path(path).write_bytes(b"\xff\xfe{")
    with pytest.raises(RecipeError, match=r"cannot be read: .*; give the file"):
        make(text)


# -- what it is given -----------------------------------------------------------------------------------------------------

REFUSED = {
    "auto(allow=())": "allow is empty",
    "auto(allow=('qsdg',))": "auto: allow names 'qsdg': ",
    "auto(allow=('accordion_qsgd(5)',))": "without an update, a bucket\\(\\), a controller",
    "auto(allow=('local_sgd(8)',))": r"must be written out: 'allreduce\(fp32\(\)\) \+ local_sgd\(8\)'",
    "auto(allow=('allreduce + gossip()',))": "has nothing to change",
    "auto(allow=('allreduce + overlap_local_sgd(8)',))": "something is on its way",
    "auto(allow=('gather(topk()) + error_feedback() + local_sgd(4)',))": "is none of models",
    "auto(allow=('allreduce + every_step(micro_batches=2)',))": "a step or batch of their own",
    "auto(allow=('topk',)) + local_sgd(4)": "plain dense averages at every step",
    "auto(allow='qsgd')": r"must be a tuple, of a text each, got 'qsgd'; write \('qsgd',\) for one",
    "auto(allow=('sgp',))": "gossip, quorums and overlap cannot be tried",
    "auto(allow=('auto',))": "a controller, a route\\(\\), or a step",
    "auto(allow=(\"allreduce + route(('a',), scatter(qsgd()))\",))": "a controller, a route\\(\\), or a step",
    "auto(allow=('dqsgd',))": "auto: allow names 'dqsgd': dqsgd needs steps",
    "auto(gain=nan)": r"gain must lie in \[0, 1\), got nan",
    "auto(gain=-0.1)": r"gain must lie in \[0, 1\)",
    "auto(gain=1.0)": r"gain must lie in \[0, 1\)",
    "auto(steps=0)": "steps must be at least 1",
    "topk + auto()": "plain dense averages at every step",
    "auto(allow=('distributed_lion',))": "without an update",
}


@pytest.mark.parametrize("text", REFUSED)
def test_bad_input_is_refused_when_the_recipe_is_made(text: str) -> None:
    with pytest.raises(RecipeError, match=REFUSED[text]):
        Recipe.of(text)


def test_candidates_that_differ_in_a_codec_or_a_mean_alone_are_all_looked_at_when_they_are_attached() -> None:
    with pytest.raises(AttachError, match="needs at least 3"):
        make("auto(allow=('gather(qsgd())', 'gather(qsgd(), mean=trimmed(1))'))", 2)


def test_a_candidate_that_no_gpu_takes_is_refused_on_one() -> None:
    recipe = Recipe.of("""auto(allow=("gather(topk(index='rice')) + error_feedback()",))""")
    refuse_lengths(recipe, torch.device("cpu"))
    with pytest.raises(AttachError, match="writes messages whose length depends on their content"):
        refuse_lengths(recipe, torch.device("cuda"))


def test_a_run_shorter_than_its_measuring_stays_dense_and_says_so() -> None:
    ranks = make("auto(steps=60)")
    run = train(ranks, pulled, 60, SLOW, alike)
    assert words(run)[-1] == "auto: dense is kept: 60 steps are no more than the 60 that measuring and trials may take"
    assert exchange(ranks) == "allreduce(fp32())"
    assert not any(e.label == "times" for e in run.ledger)


def test_trials_that_cost_too_much_of_a_run_of_known_length_end() -> None:
    """Predicted to be fast, the first turns out four times slower than dense: it ends after two steps, and the second is not tried."""
    ranks = make("auto(steps=100)")
    run = train(ranks, pulled, CHOSEN, SLOW, lambda rank, step: COMPUTING + 4.0 * (4 <= step < 7))
    assert [w for w in words(run) if "tries" in w] == ["auto tries qsgd from step 4", "auto tries dense from step 7"]
    assert exchange(ranks) == "allreduce(fp32())"


def test_a_trial_that_costs_little_of_a_run_of_known_length_has_all_its_steps() -> None:
    """Also where one of the first two is slow."""
    for recipe, slow in (("auto(steps=10000)", {4, 5, 6}), ("auto(steps=100)", {4, 5})):
        run = train(make(recipe), pulled, 16, SLOW, lambda rank, step, slow=slow: COMPUTING + 4.0 * (step in slow))
        assert [w.rpartition(" ")[2] for w in words(run) if "tries" in w] == ["4", "13"]


def test_one_rank_alone_trains_plainly() -> None:
    ranks, plain = make(size=1), make("allreduce", 1)
    assert words(train(ranks, pulled, 60, SLOW, alike)) == []
    train(plain, pulled, 60, SLOW, alike)
    assert torch.equal(ranks[0].flat(), plain[0].flat())


def test_nodes_of_several_ranks_choose_among_recipes_in_two_levels() -> None:
    ranks = make("auto + per_node(2)")
    train(ranks, pulled, CHOSEN, Network(1e-4, 2e4, per_node=2, inside=1e9), alike)
    assert exchange(ranks) == "nodes(scatter(qsgd(bucket=128)), 2)"
    assert equal(ranks)


WRITTEN = re.compile(r"; as '(.+)'\. Allowed")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("auto", "allreduce + switch_exchange(16, scatter(qsgd(bucket=128)))"),
        ("auto + bucket(0.5)", "allreduce + switch_exchange(16, scatter(qsgd(bucket=128))) + bucket(0.5)"),
        (
            "auto + per_node(2)",
            "nodes(allreduce(fp32()), 2) + switch_exchange(16, nodes(scatter(qsgd(bucket=128)), 2))",
        ),
    ],
)
def test_the_recipe_that_it_writes_puts_the_same_in_force_at_the_same_step(text: str, wanted: str) -> None:
    """Also where a step was skipped before, as a loss scaler does at first."""

    def overflows(model: nn.Module, rank: int, step: int) -> float:
        loss = pulled(model, rank, step)
        for p in model.parameters():
            if step == 2 and rank == 1 and p.grad is not None:
                p.grad.fill_(float("inf"))
        return loss

    ranks, network = make(text), Network(1e-4, 2e4, per_node=2 if "per_node" in text else 1, inside=1e9)
    run = train(ranks, overflows, CHOSEN, network, alike)
    word = words(run)[-1]
    assert word.startswith("auto: qsgd from step 18: ")
    (written,) = WRITTEN.findall(word)
    assert written == wanted
    same = make(written)
    train(same, overflows, 16, network, alike)
    assert exchange(same) == repr(Recipe.of(written).exchange)
    train(same, overflows, 1, network, alike)
    assert exchange(same) == exchange(ranks)


class TwoShards:
    """A replica of two ranks, of which this one is the first; the second shard of the first replica computes for long."""

    index, size = 0, 2

    def least(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def total(self, values: Sequence[float]) -> list[float]:
        return [2 * value for value in values]

    def all(self, holds: bool) -> bool:
        return holds

    def told(self, facts: Any, label: str, step: int, lane: str = "comm") -> list[Any]:
        rows = (len(facts[0]) - 3 * NUMBERS - NUMBERS - 2) // 3  # of three candidates and one block
        return [facts, [[x + 2.0 * (i < rows) for i, x in enumerate(facts[0])], *facts[1:]]]

    def open_lane(self, name: str) -> None: ...
    def outlive(self, lost: object) -> None: ...
    def close(self) -> None: ...


def test_where_ranks_hold_shards_a_slow_one_is_named_by_its_place_among_all() -> None:
    ranks = make(size=2)
    for replica in ranks:
        replica.worker.replica = TwoShards()
    run = train(ranks, pulled, 20, FAST, alike)
    assert "; rank 1 computes 2.1 s a step, the others 100 ms" in words(run)[-1]


def test_shards_of_unlike_lengths_predict_the_same() -> None:
    """Where FSDP2 cuts rows that do not divide."""
    lengths, found = [(3, 2), (1, 2)], list[list[float]]()
    cost, unknown = CandidateCost(0.02, 0.25, 2.0), float("nan")
    times = RankTimes(
        [0.4] * 3, [0.3] * 3, [unknown] * 3, [0.1, 0.1], [0.2, 0.1], [cost], latency=0.001, error=unknown, machine=1.0
    )

    def over_shards(numbers: Sequence[float]) -> list[float]:
        return [float(sum(each)) for each in zip(*lengths, strict=True)]

    for mine in lengths:
        blocks = [Bucket.of({f"p{i}": torch.zeros(n, dtype=torch.float32)}) for i, n in enumerate(mine)]
        state: State = {"looked": torch.tensor(1.0)}
        facts = Facts(4, 0.1, blocks, times=[times], over_shards=over_shards, size=2)
        options = AutoOptions(("qsgd",), [True], gain=0.1, steps=None, most=60)
        AutoSearch(options, facts, state, lambda number: Recipe.of("allreduce" if number < 0 else "qsgd")).next()
        found.append(state["guesses"].tolist())
    assert found[0] == found[1]


def test_shards_of_unlike_shapes_are_of_one_model() -> None:
    said = list[str]()
    for rows in (3, 2):
        blocks = [Bucket.of({"w": torch.zeros(rows, 4, dtype=torch.float32)})]
        facts = Facts(1, 0.1, blocks, size=2, shapes={"w": (5, 4)}, tell=said.append)
        AutoSearch(AutoOptions(("qsgd",), [True], 0.1, None, 60), facts, {}, lambda number: None).begin()
    assert said[0] == said[1] == head({"w": (5, 4)}, 2)


class Wide(nn.Module):
    """A gradient so long that a pool keeps its memory."""

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(160, 160, generator=rng, dtype=torch.float32))


def large_after(recipe: str) -> int:
    """How many memories of a gradient's size there are once two ranks have measured."""
    ranks = replicas(recipe, Wide, sgd, 2)
    train(ranks, pulled, CHOSEN, FAST, alike)
    size = 4 * ranks[0].flat().numel()
    gc.collect()
    found = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided]
    return len({t.untyped_storage().data_ptr() for t in found if t.untyped_storage().nbytes() >= size})


def test_its_measuring_leaves_nothing_of_a_gradients_size_behind() -> None:
    ranks, _ = settled()
    times = ranks[0].worker.controller.times
    held = [value for value in vars(times).values() if isinstance(value, Tensor)]
    assert not held
    assert max(t.numel() for t in ranks[0].worker.controller.state.values()) <= CHOSEN
    assert large_after("auto") == large_after("allreduce")


def test_its_measuring_holds_one_copy_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here candidates take longer than a step computes: one is still being run when the next gradient is there."""
    copies, alive, whole = list[ref[Tensor]](), list[int](), StepTimes.around

    def around(self: StepTimes, index: int, program: Program[Any], flat: Tensor) -> Program[Any]:
        found = yield from whole(self, index, program, flat)
        if self is ranks[0].worker.controller.times and self._copy is not None:
            copies.append(ref(self._copy))
            alive.append(sum(copy() is not None for copy in copies))
        return found

    monkeypatch.setattr(StepTimes, "around", around)
    ranks = make("auto(allow=('bf16', 'fp16'))")
    train(ranks, pulled, 20, Network(1e-4, 4e4), alike)
    assert 3 * ranks[0].worker.controller.times._costs[0].work > COMPUTING
    assert alive == [1, 1, 1]


def test_under_a_loss_scale_no_mean_is_copied_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, seen, decide = make(size=2), list[bool](), Auto.decide

    def looking(self: Auto, facts: Facts, recipe: Any, state: State) -> Any:
        means = {mean.data_ptr() for r in ranks for mean in r.worker.averaging.means}
        seen.append(all(block.flat.data_ptr() in means for block in facts.blocks))
        return decide(self, facts, recipe, state)

    monkeypatch.setattr(Auto, "decide", looking)
    for replica in ranks:
        replica.worker.scale = 4.0
    train(ranks, pulled, 3, FAST, alike)
    assert seen == 6 * [True]


def test_what_a_memory_owes_is_paid_when_the_user_names_one() -> None:
    """Sum of what was given == sum of what was applied + what is owed, through trials and back."""
    ranks = make("auto(allow=('topk', 'qsgd'))")
    given, start = torch.zeros(1056, dtype=torch.float64), ranks[0].flat().double()

    def counted(model: nn.Module, rank: int, step: int) -> float:
        loss = pulled(model, rank, step)
        given.add_(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).double() / 4)
        return loss

    run = train(ranks, counted, 14, SLOW, alike)  # the trial of topk, and dense again
    assert any("tries topk" in w for w in words(run))
    applied = (start - ranks[0].flat().double()) / 0.05
    assert exchange(ranks) == "allreduce(fp32())"
    assert torch.allclose(given, applied, atol=2e-3)
