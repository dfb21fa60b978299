"""Turning a knob costs nothing where the model is cut as before: no channel is made anew, no memory is copied, nothing is lost."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.runtime.gym import bit_equal, by_name, make, parameters, pull, resumed, saved, train

from gossamer.core.bucket import State
from gossamer.core.contracts import Controller, Facts
from gossamer.core.parts import parse
from gossamer.recipe import Recipe


@dataclass(frozen=True, repr=False)
class Turns(Controller):
    """At every step the other one of two exchanges."""

    one: str
    other: str
    name = "turns"

    def reach(self, recipe: Any) -> Iterable[Any]:
        return [replace(recipe, exchange=parse(self.other))]

    def decide(self, facts: Facts, recipe: Any, state: State) -> Any:
        return replace(recipe, exchange=parse((self.one, self.other)[facts.step % 2]))


def turning(one: str, other: str, memory: str) -> Recipe:
    return replace(Recipe.of(f"{one} + {memory}"), controller=Turns(one, other))


SAME = [
    ("gather(qsgd(bits=8))", "gather(qsgd(bits=4))", "diana()"),
    ("scatter(qsgd(bits=8))", "scatter(qsgd(bits=4))", "diana()"),
    ("scatter(topk(ratio=0.3))", "scatter(topk(ratio=0.1))", "error_feedback()"),
    ("gather(topk(ratio=0.3))", "gather(topk(ratio=0.1))", "error_feedback()"),
]
OTHER_SORT = ("scatter(topk(ratio=0.3))", "gather(topk(ratio=0.1))", "error_feedback()")


@pytest.mark.parametrize("knob", SAME, ids=str)
def test_channels_and_memories_are_those_that_there_were(knob: tuple[str, str, str]) -> None:
    ranks = make(turning(*knob), 3)
    train(ranks, pull, 1)
    worker = ranks[0].worker
    buckets, exchange = worker.buckets, worker.recipe.exchange
    kept = {k: t for c in buckets for role in ("memory", "exchange") for k, t in c.states[role].items()}
    held = {k: t.data_ptr() for k, t in kept.items()}
    worker.controller.adopt(replace(worker.recipe, exchange=parse(knob[0])))
    assert worker.buckets is buckets
    assert buckets[0].exchange == worker.recipe.exchange != exchange
    assert buckets[0].shift == buckets[0].memory.follow(buckets[0].exchange.omega(buckets[0].layout, 3))
    now = {k: t.data_ptr() for c in buckets for role in ("memory", "exchange") for k, t in c.states[role].items()}
    assert now == held


@pytest.mark.parametrize("knob", [k for k in (*SAME, OTHER_SORT) if "error" in k[2]], ids=str)
def test_nothing_is_lost_as_it_turns(knob: tuple[str, str, str]) -> None:
    size, steps = 3, 5
    ranks = make(turning(*knob), size, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0))
    got = given = 0.0
    for step in range(1, steps + 1):
        train(ranks, pull, 1)
        mean = ranks[0].worker.by_name(ranks[0].worker.averaging.means)["matrix"]
        got = got + mean.double()
        alone = make("allreduce", size)
        for r, other in zip(ranks, alone, strict=True):
            other.model.load_state_dict(r.model.state_dict())
            other.worker.step = step
        train(alone, pull, 1)
        given = given + alone[0].worker.by_name(alone[0].worker.averaging.means)["matrix"].double()
        residual = [by_name(r.worker.buckets, "memory", "residual")["matrix"].double() for r in ranks]
        owed = [by_name(r.worker.buckets, "exchange", "owed").get("matrix", torch.zeros(())).double() for r in ranks]
        if "gather" in repr(ranks[0].worker.buckets[0].exchange):
            assert not any(debt.any() for debt in owed)  # there are no owners who would pay it
        kept = torch.stack(residual).mean(0) + sum(owed)
        torch.testing.assert_close(got + kept, given, rtol=1e-4, atol=1e-4)


def test_a_run_that_is_resumed_turns_on() -> None:
    from gossamer.controllers import Accordion

    mild, harsh, memory = SAME[1]
    controller = Accordion(parse(mild), parse(harsh), epoch=2, interval=1, threshold=0.1)
    recipe = repr(replace(Recipe.of(f"{mild} + {memory}"), controller=controller))
    ranks = make(recipe, 3)
    train(ranks, pull, 5)
    again = resumed(recipe, saved(ranks))
    for run in (ranks, again):
        train(run, pull, 4)
    assert bit_equal([*parameters(ranks), *parameters(again)])
