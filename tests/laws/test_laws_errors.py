"""What a request raises, a part may catch: on every fabric, wherever the part is in the chain of programs."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
from tests.gang import Gang
from tests.integrations.loops import attached, small_step
from tests.runtime.gym import bit_equal, make, parameters, pull, train

from gossamer.codecs import FP32
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Context, Exchange, ReduceResult
from gossamer.core.loop import Loop
from gossamer.core.schedule import Schedule, Shape
from gossamer.core.step_phases import after_optimizer_step, until_optimizer_step
from gossamer.core.verbs import Compute, OptimizerStep, Program
from gossamer.exchanges import AllReduced
from gossamer.planning import bytes_per_step
from gossamer.recipe import Recipe

caught = list[str]()


class Oops(Exception):
    pass


def fail() -> None:
    raise Oops


def attempt(where: str) -> Program[None]:
    try:
        yield Compute(fail, where)
    except Oops:
        caught.append(where)


@dataclass(frozen=True, repr=False)
class CarefulSchedule(Schedule):
    """What it asks for may fail, before and after the descent; then it goes on."""

    name = "careful_schedule"

    @cached_property
    def shape(self) -> Shape:
        return Shape(averages_gradients=True, works_alone=True)

    def step(self, loop: Loop) -> Program[None]:
        yield from attempt("before the descent")
        yield from loop.averages.wait_gradients()
        yield OptimizerStep()
        yield from attempt("after the descent")


@dataclass(frozen=True, repr=False)
class CarefulExchange(Exchange):
    """What it asks for may fail; then it goes on."""

    name = "careful_exchange"
    unbiased, needs_feedback, contracts = True, False, True  # pyright: ignore[reportAssignmentType]

    def omega(self, layout: Layout, size: int) -> float:
        return 0.0

    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        yield from attempt("in the exchange")
        return (yield from AllReduced(FP32()).average(block, state, context))


EVERYWHERE = {"before the descent", "after the descent", "in the exchange"}
RECIPE = Recipe(CarefulExchange(), schedule=CarefulSchedule())


def by_hand(program: Program[Any]) -> None:
    """The smallest fabric there can be: it computes."""
    answer, error = None, None
    while True:
        try:
            verb = program.throw(error) if error else program.send(answer)
        except StopIteration:
            return
        answer, error = None, None
        assert isinstance(verb, Compute)
        try:
            answer = verb.work()
        except Oops as failure:
            error = failure


class NothingToAverage:
    """A loop that has nothing to average, and its averages."""

    @property
    def averages(self) -> "NothingToAverage":
        return self

    def wait_gradients(self) -> Program[None]:
        yield from ()


def test_by_hand_both_halves_of_a_step_hear_of_it() -> None:
    caught.clear()
    steps = CarefulSchedule().step(NothingToAverage())  # pyright: ignore[reportArgumentType]
    by_hand(until_optimizer_step(steps))
    assert caught == ["before the descent"]
    by_hand(after_optimizer_step(steps, descended=True))
    assert caught == ["before the descent", "after the descent"]


def test_what_nobody_catches_comes_out_of_both_halves() -> None:
    def careless(early: bool) -> Program[None]:
        if early:
            yield Compute(fail, "careless")
        yield OptimizerStep()
        yield Compute(fail, "careless")

    with pytest.raises(Oops):
        by_hand(until_optimizer_step(careless(early=True)))
    steps = careless(early=False)
    by_hand(until_optimizer_step(steps))
    with pytest.raises(Oops):
        by_hand(after_optimizer_step(steps, descended=True))


def test_in_the_simulator() -> None:
    caught.clear()
    ranks = make(RECIPE, 2)
    train(ranks, pull, 2)
    assert set(caught) == EVERYWHERE
    assert bit_equal(parameters(ranks))


def test_on_paper() -> None:
    caught.clear()
    assert bytes_per_step(RECIPE, {"w": (8,)}, 4) == bytes_per_step("allreduce", {"w": (8,)}, 4)
    assert set(caught) == EVERYWHERE


def careful(rank: int, size: int) -> set[str]:
    caught.clear()
    with attached(RECIPE) as (model, optimizer, comm):
        for _ in range(2):
            small_step(model, optimizer, comm, rank)
        comm.check_sync()
    return set(caught)


@pytest.mark.gang
def test_on_gloo(gang2: Gang) -> None:
    assert gang2.run(careful) == [EVERYWHERE, EVERYWHERE]
