"""Changes in mid-run: what a controller may put in force after what, so that nothing is lost and nobody diverges.

What a memory owes is paid or taken over, and what a schedule keeps begins anew. Where neither would be right, the recipe is
refused when it is made.
"""

from collections.abc import Sequence
from itertools import permutations
from typing import Any

from gossamer.combinations import ways
from gossamer.core.constraints import agree
from gossamer.core.contracts import Exchange, Memory
from gossamer.core.errors import RecipeError
from gossamer.core.parts import require
from gossamer.core.schedule import Schedule, TrainsElsewhere

ANEW = "make the change between two runs instead: save, and attach the model again with the other recipe"


def check_changes(recipe: Any, reached: Sequence[Any]) -> None:
    """Refuse a recipe whose controller could put something in force that cannot follow on what was before it."""
    found = list(dict.fromkeys((recipe, *reached)))
    for one in found[1:]:
        for way in ways(one):
            agree({**way, "controller": recipe.controller})
    require(
        len({one.update for one in found}) == 1,
        f"{recipe.controller} could change the recipe's update in mid-run, which holds for a whole run; {ANEW}",
    )
    for some in recipe.controller.neighbours(recipe, reached):
        _check_schedules(recipe, some)
        for before, after in permutations(dict.fromkeys(one for one, _ in _pairs(some)), 2):
            _check_exchanges(recipe, before, after)
        for before, after in permutations(dict.fromkeys(one for _, one in _pairs(some)), 2):
            _check_memories(recipe, before, after)


def _pairs(found: Sequence[Any]) -> list[tuple[Exchange, Memory]]:
    """Exchanges and memories that may follow one another on a parameter; those of rules that all have never change."""
    changing = found if len({one.rules for one in found}) > 1 else ()
    ruled = [(rule.exchange, rule.memory) for one in changing for rule in one.rules]
    return [*((one.exchange, one.memory) for one in found), *ruled]


def begins_anew(before: Schedule, after: Schedule) -> bool:
    """Whether what a schedule keeps is of no use to another: it is of another kind, or acts on other numbers."""
    return kind_of(before) != kind_of(after)


def crosses(before: Schedule, after: Schedule) -> bool:
    """Whether one averages gradients and the other models, so that nothing that a memory learned of one holds for the other."""
    return before.shape.averages_gradients != after.shape.averages_gradients


def kind_of(schedule: Schedule) -> tuple[Any, ...]:
    """What state of a schedule depends on: its class, and the numbers that it acts on."""
    return type(schedule), schedule.shape.averages_gradients, schedule.shape.mixer


def _hands_over(schedule: Schedule) -> bool:
    """True if another schedule may take over after any step at which a controller is asked: all models are equal then,
    nothing is in flight, and no state of it is needed later.
    """
    shape = schedule.shape
    steps = range(shape.prelude + 1, shape.prelude + shape.period + 1)
    kept = bool(shape.lane) or isinstance(schedule, TrainsElsewhere) or not shape.hands_over
    return not kept and any(map(schedule.is_synced, steps))


def _check_schedules(recipe: Any, found: Sequence[Any]) -> None:
    schedules = list(dict.fromkeys(one.schedule for one in found))
    if len({kind_of(one) for one in schedules}) == 1:
        return
    named = " and ".join(map(str, schedules[:2]))
    require(
        recipe.controller.moves_schedule,
        f"{recipe.controller} could change the schedule, between {named}, and does not say so: its `moves_schedule` must be True",
    )
    for one in schedules:
        require(
            _hands_over(one),
            f"{recipe.controller} could change between {named}: under {one} models differ, something is on its way or a second "
            "model is kept when a controller decides, which another schedule would lose. Change between schedules after whose "
            f"rounds all models are equal, such as every_step(), local_sgd(8) and slowmo(8); or {ANEW}",
        )
    if not any(crosses(schedules[0], one) for one in schedules):
        return
    require(
        recipe.update is None,
        f"{recipe.controller} could change between {named}, of which one averages gradients and the other models, and what "
        f"{recipe.update} remembers is of each rank's own gradients under the latter: leave the update out; or {ANEW}",
    )
    for one in found:
        for way in ways(one):
            memory, exchange = way["memory"], way["exchange"]
            owing = memory if isinstance(memory, Memory) and memory.owes else exchange
            require(
                owing is not memory and "own feedback" not in exchange.traits,
                f"{recipe.controller} could change between {named}, of which one averages gradients and the other models, and what "
                f"{owing} holds back of gradients is none of models: leave it out, and use an unbiased exchange such as "
                f"scatter(qsgd()); or {ANEW}",
            )


def _check_exchanges(recipe: Any, before: Exchange, after: Exchange) -> None:
    for one in before, after:
        if one.owes or "adds momentum" in one.traits:
            raise RecipeError(
                f"{recipe.controller} could change between {before} and {after}: {one} keeps a momentum or a debt of its own, "
                f"which no other exchange can go on with; {ANEW}"
            )


def _check_memories(recipe: Any, before: Memory, after: Memory) -> None:
    between = f"{recipe.controller} could change between {before} and {after}: "
    require(recipe.controller.cuts, f"{between}it leaves all parameters in their blocks, and may change codecs only")
    for one in before, after:
        require(
            "fades" not in one.traits,
            f"{between}what {one} keeps is a running mean that fades, and no debt that could be paid; {ANEW}",
        )
        require(
            "adds momentum" not in one.traits or (type(before) is type(after) and before.gain == after.gain),
            f"{between}{one} has momentum, under which a gradient that stays counts {one.gain:.3g} times, and under the other it "
            "would not: take the same memory with the same momentum throughout (momentum_correction(masking=False) goes with "
            f"dense averages too), or none and the optimizer's momentum; or {ANEW}",
        )
