"""A controller of the tests: it puts other parts and rules in force at a step, and takes them back at another."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, final

from gossamer.core.bucket import State
from gossamer.core.contracts import Controller, Exchange, Facts, Memory
from gossamer.core.schedule import Schedule
from gossamer.recipe import Recipe
from gossamer.rules import Rule


@final
@dataclass(frozen=True, repr=False)
class Turns(Controller):
    """From step `at` on there are the second parts, and from step `back` on the first ones again."""

    name = "turns"

    at: int
    back: int
    exchange: Exchange
    memory: Memory
    schedule: Schedule
    other_exchange: Exchange
    other_memory: Memory
    other_schedule: Schedule
    rules: tuple[Rule, ...] = ()
    other_rules: tuple[Rule, ...] = ()

    @property
    def moves_schedule(self) -> bool:
        return True

    def reach(self, recipe: Any) -> Iterable[Any]:
        yield replace(recipe, exchange=self.exchange, memory=self.memory, schedule=self.schedule, rules=self.rules)
        yield replace(
            recipe,
            exchange=self.other_exchange,
            memory=self.other_memory,
            schedule=self.other_schedule,
            rules=self.other_rules,
        )

    def decide(self, facts: Facts, recipe: Any, state: State) -> Any:
        first, second = self.reach(recipe)
        return second if self.at <= facts.step < self.back else first


def turning(first: str, second: str, at: int = 3, back: int = 7, bucket: str = "") -> Recipe:
    """A recipe that turns from one to another and back."""
    a, b = Recipe.of(first + bucket), Recipe.of(second)
    turns = Turns(at, back, a.exchange, a.memory, a.schedule, b.exchange, b.memory, b.schedule, a.rules, b.rules)
    return replace(a, controller=turns)
