"""The state of a training step between the calls of a training loop, and its transitions: all of them are in one table.

A step begins when its gradients are averaged, or, under local recipes, when an optimizer is about to step. It ends when all
optimizers have had their turn, or when the next step shows that it was skipped.
"""

from enum import Enum

from gossamer.core.errors import GossamerError


class StepState(Enum):
    """Where a training step is."""

    IDLE = "no step has begun"
    READY = "the schedule waits for the optimizer step"
    MIXED = "gradients of this rank only were added to averaged ones"
    STEPPING = "some optimizers have had their turn"
    DROPPED = "the members have changed, and its gradients are dropped"
    CATCHING_UP = "updates that this rank has missed are applied"


class StepEvent(Enum):
    """What happens to a training step."""

    BEGIN = "the schedule ran up to the optimizer step"
    MISS = "an update that this rank has missed is about to be applied"
    CATCH_UP = "it was applied"
    ADD = "a backward pass under no_sync() added gradients of this rank only"
    TURN = "an optimizer stepped, or its step was left out"
    END = "the schedule ran to its end"
    DROP = "the members have changed before its gradients were agreed on"
    FORGET = "a checkpoint was loaded"


TRANSITIONS = {
    (StepState.IDLE, StepEvent.BEGIN): StepState.READY,
    (StepState.IDLE, StepEvent.MISS): StepState.CATCHING_UP,
    (StepState.CATCHING_UP, StepEvent.CATCH_UP): StepState.IDLE,
    (StepState.IDLE, StepEvent.DROP): StepState.DROPPED,
    (StepState.DROPPED, StepEvent.END): StepState.IDLE,
    (StepState.READY, StepEvent.ADD): StepState.MIXED,
    (StepState.IDLE, StepEvent.TURN): StepState.STEPPING,  # one rank, whose schedule has nothing to do
    (StepState.READY, StepEvent.TURN): StepState.STEPPING,
    (StepState.MIXED, StepEvent.TURN): StepState.STEPPING,  # a scaler left the step out; a step itself is an error
    (StepState.STEPPING, StepEvent.TURN): StepState.STEPPING,
    (StepState.STEPPING, StepEvent.ADD): StepState.STEPPING,  # gradients of an optimizer that has had its turn
    (StepState.MIXED, StepEvent.ADD): StepState.MIXED,
    (StepState.READY, StepEvent.END): StepState.IDLE,  # skipped
    (StepState.MIXED, StepEvent.END): StepState.IDLE,  # skipped
    (StepState.STEPPING, StepEvent.END): StepState.IDLE,
    **{(state, StepEvent.FORGET): StepState.IDLE for state in StepState},
}


def after(state: StepState, event: StepEvent) -> StepState:
    """The state after an event.

    >>> after(StepState.READY, StepEvent.TURN).name
    'STEPPING'
    """
    if (state, event) not in TRANSITIONS:
        raise GossamerError(f"a training step is in the state {state.name} ({state.value}), and {event.value}: a bug")
    return TRANSITIONS[state, event]
