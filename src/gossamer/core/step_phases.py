"""A step's two halves: what a schedule does before the optimizer descends, and after."""

from typing import Any

from gossamer.core.errors import AttachError
from gossamer.core.verbs import LateUpdate, OptimizerStep, Program


def until_optimizer_step(steps: Program[None]) -> Program[LateUpdate | None]:
    """Run a schedule up to the moment the optimizer must step, or make up for a step that this rank has missed."""
    descend = yield from _as_far_as_descend(steps, None)
    if descend is None:
        raise AttachError("the schedule ended without a descent")
    return descend.missed


def after_optimizer_step(steps: Program[None], descended: bool) -> Program[None]:
    """Run a schedule from the descent to its end."""
    if (yield from _as_far_as_descend(steps, descended)) is not None:
        raise AttachError("the schedule asked for a second descent in one step")


def _as_far_as_descend(steps: Program[None], answer: Any) -> Program[OptimizerStep | None]:
    """Pass requests on, and to the schedule what comes of them, errors too: it may know what to do. None at its end."""
    error: Exception | None = None
    while True:
        try:
            verb = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration:
            return None
        if isinstance(verb, OptimizerStep):
            return verb
        answer, error = None, None
        try:
            answer = yield verb
        except Exception as raised:
            error = raised
