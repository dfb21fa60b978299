"""A step's two halves: what a schedule does before the optimizer descends, and after."""

from typing import Any

from gossamer.core.errors import AttachError
from gossamer.core.verbs import Descend, Program


def until_descend(steps: Program[None]) -> Program[None]:
    """Run a schedule up to the moment the optimizer must step."""
    answer: Any = None
    while True:
        try:
            verb = steps.send(answer)
        except StopIteration:
            raise AttachError("the schedule ended without a descent") from None
        if isinstance(verb, Descend):
            return
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
