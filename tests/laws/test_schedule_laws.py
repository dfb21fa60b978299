"""The law of schedules: one descent a step, the same programs on all ranks in one order, and a true word on who is equal."""

from collections import Counter, defaultdict

import pytest
from tests.laws.samples import carried, schedules
from tests.runtime.gym import bit_equal, make, parameters, pull, sgd, train, weighted_optimum

from gossamer.core.schedule import Schedule
from gossamer.core.verbs import OptimizerStep
from gossamer.fabrics.sim import simulate
from gossamer.planning.dry_run import DryRun
from gossamer.recipe import Recipe

STEPS = 9
every_schedule = pytest.mark.parametrize("schedule", schedules(), ids=repr)
every_carried = pytest.mark.parametrize("recipe", [r for s in schedules() for r in carried(s)], ids=repr)


@every_schedule
def test_something_can_carry_it(schedule: Schedule) -> None:
    assert list(carried(schedule))


@every_carried
def test_it_descends_once_a_step(recipe: Recipe) -> None:
    """Counted where the schedule asks for it: the program of one step, driven by hand."""
    ranks, asked = make(recipe, 3), Counter[int]()

    def counting(rank: int):
        worker = ranks[rank].worker
        for i, bucket in enumerate(worker.buckets) if recipe.schedule.averages(worker.step) else ():
            yield from worker.ready(i, bucket.empty())
        steps, answer = worker.steps(), None
        while True:
            try:
                verb = steps.send(answer)
            except StopIteration:
                break
            if isinstance(verb, OptimizerStep):
                assert verb.missed is None
                asked[rank] += 1
                answer = True
            else:
                answer = yield verb
        worker.end_step()

    for step in range(1, STEPS + 1):
        for r in ranks:
            r.worker.live.clear()  # what waits in a simulation that is over
        simulate([counting(r) for r in range(3)])
        assert asked == dict.fromkeys(range(3), step)


@every_carried
def test_all_ranks_start_the_same_programs_in_the_same_order(recipe: Recipe) -> None:
    run = train(make(recipe, 3), pull, STEPS)
    asked = defaultdict[int, list[tuple[int, str, str]]](list)
    for entry in run.ledger:
        label = "" if entry.label == f"rank {entry.rank}" else entry.label  # what is asked outside of a program
        asked[entry.rank].append((entry.step, entry.verb, label))
    assert asked[0] == asked[1] == asked[2]
    assert asked[0]


@every_carried
def test_models_are_equal_after_just_the_steps_that_it_names(recipe: Recipe) -> None:
    ranks = make(recipe, 3)
    for step in range(1, STEPS + 1):
        train(ranks, pull, 1)
        assert bit_equal(parameters(ranks)) == recipe.schedule.is_synced(step), step


@every_carried
def test_every_round_ends(recipe: Recipe) -> None:
    ends = [step for step in range(1, 4 * STEPS) if recipe.schedule.ends_round(step)]
    assert ends
    assert max(b - a for a, b in zip([0, *ends], ends, strict=False)) <= STEPS


@every_carried
def test_training_goes_somewhere(recipe: Recipe) -> None:
    ranks = make(recipe, 3, optimizer=sgd(momentum=0.0))  # slow momentum over fast would swing for longer
    train(ranks, pull, 4 * STEPS)
    assert all(model.isfinite().all() for model in parameters(ranks))
    assert sum(r.losses[-1] for r in ranks) < 0.8 * sum(r.losses[0] for r in ranks)


@every_carried
def test_what_it_asks_for_repeats_after_its_period(recipe: Recipe) -> None:
    period, prelude = recipe.schedule.shape.period, recipe.schedule.shape.prelude
    begin = -(-prelude // period) * period
    run, asked = DryRun(recipe, step=begin + 1), list[tuple[int, int]]()
    for _ in range(period):
        run.take_step()  # what a round before it left on its way
    for _ in range(3 * period):
        before = len(run.averages), len(run.mail)
        run.take_step()
        asked.append((len(run.averages) - before[0], len(run.mail) - before[1]))
    assert asked[:period] == asked[period : 2 * period] == asked[2 * period :]
    assert any(asked)


@every_schedule
def test_it_ends_where_the_weights_of_ranks_say_or_cannot_be_told_any(schedule: Schedule) -> None:
    """To within the rate of local steps; some of which are taken at too few of them."""
    if not {"counts alike", "waits for few"} & schedule.traits:
        assert abs(weighted_optimum(schedule) - 1 / 4) < 0.08
