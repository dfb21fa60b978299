"""The two phases of a step: what a schedule does before the optimizer step, and after it."""

from typing import Any

from gossamer.core.errors import AttachError
from gossamer.core.verbs import LateUpdate, OptimizerStep, Program


def until_optimizer_step(steps: Program[None]) -> Program[LateUpdate | None]:
    """Run a schedule up to its optimizer step, or to the update of a step that this rank has missed."""
    descend = yield from _as_far_as_descend(steps, None)
    if descend is None:
        raise AttachError("the schedule ended without an OptimizerStep; its `step` must yield one at each step")
    return descend.missed


def after_optimizer_step(steps: Program[None], descended: bool) -> Program[None]:
    """Run a schedule from the optimizer step to its end."""
    if (yield from _as_far_as_descend(steps, descended)) is not None:
        raise AttachError("the schedule yielded a second OptimizerStep in one step; its `step` must yield one")


def _as_far_as_descend(steps: Program[None], answer: Any) -> Program[OptimizerStep | None]:
    """Pass requests on, and their answers and errors back, up to the next OptimizerStep; None at the schedule's end."""
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
