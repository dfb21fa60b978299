"""A step's two halves: what a schedule does before the optimizer descends, and after."""

from typing import Any

from gossamer.core.errors import AttachError
from gossamer.core.verbs import Descend, Missed, Program


def until_descend(steps: Program[None]) -> Program[Missed | None]:
    """Run a schedule up to the moment the optimizer must step, or make up for a step that this rank has missed."""
    answer: Any = None
    while True:
        try:
            verb = steps.send(answer)
        except StopIteration:
            raise AttachError("the schedule ended without a descent") from None
        if isinstance(verb, Descend):
            return verb.missed
        answer = yield verb


def rest(steps: Program[None], descended: bool) -> Program[None]:
    """Run a schedule from the descent to its end."""
    answer: Any = descended
    while True:
        try:
            verb = steps.send(answer)
        except StopIteration:
            return
        answer = yield verb
