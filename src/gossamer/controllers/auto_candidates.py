"""The candidates of `auto`, which are texts: what they may change, and how long they must be watched."""

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from gossamer.controllers.auto_table import ALLOWED, TABLE
from gossamer.core.contracts.times import CandidateCost
from gossamer.core.errors import RecipeError
from gossamer.core.last_layer import last_layer
from gossamer.core.parts import registry
from gossamer.core.schedule import Schedule
from gossamer.core.text import terms

TRIED = 8  # steps of a trial, after one that warms up
ROUNDS = 5  # whole rounds of a trial, after one that warms up and may be shorter: as many as an interval of 90 % needs
KEPT = 64  # rows that ranks keep


def names_rounds(texts: Sequence[str]) -> bool:
    """True if a text names a schedule of its own.

    >>> names_rounds(["qsgd"]), names_rounds(["qsgd", "scatter(qsgd()) + local_sgd(8)"])
    (False, True)
    """
    return any(part is not None and part.kind == Schedule.kind for text in texts for part in _later_parts(text))


def _later_parts(text: str) -> list[type | None]:
    try:
        _, *later = terms(text)
    except (RecipeError, ValueError):
        return []  # what is wrong with it is told where it is read
    words = [node.func if isinstance(node, ast.Call) else node for node in later]
    return [registry.get(word.id) for word in words if isinstance(word, ast.Name)]


def default_for(shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """The default list for a model of these parameters: without recipes that send the last layer apart, if it is no matrix.

    >>> default_for({"0.weight": (4, 2), "0.bias": (4,)})[-1]
    "terngrad(last='qsgd')"
    >>> default_for({"tied.weight": (4, 2), "norm.weight": (4,)})[-1]
    'qsgd'
    """
    names = [*shapes]
    last = last_layer(shapes) if names else []
    if names and names[-1] in last and any(len(shapes[name]) == 2 for name in last):
        return ALLOWED
    return tuple(row.recipe for row in TABLE if not row.needs_matrix)


def keeps_nothing(one: Any, dense: Any) -> bool:
    """True if a recipe owes nothing of gradients and has no rounds, so that another such one may follow on it at any step."""
    ways = [one, *one.rules]
    kept = {"own feedback", "adds momentum"}
    return one.schedule == dense.schedule and not any(
        way.memory != dense.memory or way.exchange.owes or way.exchange.traits & kept for way in ways
    )


def round_of(schedule: Schedule) -> int:
    """The steps of a round; 0 where gradients are averaged at every step."""
    return 0 if schedule.shape.averages_gradients else schedule.shape.period


def trial_of(schedule: Schedule) -> int:
    """The most steps that a trial takes."""
    return max(TRIED + 1, (ROUNDS + 1) * round_of(schedule))


def window_of(schedule: Schedule, step: int, rows: int, steps: int) -> tuple[int, int]:
    """The rows of a window that begins after this step, and its last step.

    Under rounds of local steps a row is a round, and the window is one of whole rounds: the time of part of a round says nothing.
    """
    if not round_of(schedule):
        return rows, step + steps
    rounds, last = 0, step
    while rounds <= ROUNDS or last < step + steps or not schedule.is_synced(last):
        last += 1
        rounds += schedule.is_synced(last)
    return min(rounds - 1, KEPT), last


def in_rounds(costs: Sequence[CandidateCost], schedules: Sequence[Schedule]) -> list[CandidateCost]:
    """Costs that were measured of one average each, with the steps between two of them."""
    return [cost._replace(every=float(round_of(one))) for cost, one in zip(costs, schedules, strict=True)]
