"""The states of a training step: the table itself, and every order in which training loops call things."""

import warnings
from itertools import product

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import attached, flat, loss_of
from torch import nn

import gossamer
from gossamer.core.errors import AttachError, GossamerError
from gossamer.core.verbs import MembersChanged, Program
from gossamer.integrations.step_state import TRANSITIONS, StepEvent, StepState, after

IDLE, READY, MIXED, STEPPING = StepState.IDLE, StepState.READY, StepState.MIXED, StepState.STEPPING


@pytest.mark.parametrize(("state", "event"), [*product(StepState, StepEvent)])
def test_an_event_leads_where_the_table_says_or_is_an_error(state: StepState, event: StepEvent) -> None:
    if (state, event) in TRANSITIONS:
        assert after(state, event) is TRANSITIONS[state, event]
        return
    with pytest.raises(GossamerError, match=f"state {state.name} .*: a bug"):
        after(state, event)


def test_every_state_is_reached_and_left() -> None:
    into = {to for (at, _), to in TRANSITIONS.items() if at is not to}
    out = {at for (at, event), to in TRANSITIONS.items() if at is not to and event is not StepEvent.FORGET}
    assert into == out == set(StepState)


def test_what_a_loaded_checkpoint_leaves_is_a_step_that_has_not_begun() -> None:
    assert {after(state, StepEvent.FORGET) for state in StepState} == {IDLE}


# Calls: b backward, n backward under no_sync, c clip, s step, z zero_grad, k comm.skip. The states after each call, of a
# recipe that averages gradients, and of local steps; x: the call is an error that says what to do.
ORDERS = {
    "b s": ([READY, IDLE], [IDLE, IDLE]),
    "b c s": ([READY, READY, IDLE], [IDLE, IDLE, IDLE]),
    "n b s": ([IDLE, READY, IDLE], [IDLE, IDLE, IDLE]),
    "b n s": ([READY, MIXED, "x"], [IDLE, IDLE, IDLE]),
    "b z n b s": ([READY, READY, IDLE, READY, IDLE], [IDLE] * 5),
    "b k b s": ([READY, IDLE, READY, IDLE], [IDLE] * 4),
    "b b s": ([READY, READY, IDLE], [IDLE] * 3),
    "b n b s": ([READY, MIXED, READY, IDLE], [IDLE] * 4),
    "n s": ([IDLE, "x"], [IDLE, IDLE]),
    "s": (["x"], [IDLE]),
    "b s s": ([READY, IDLE, "x"], [IDLE] * 3),
}


def states_after(rank: int, size: int, order: str, recipe: str) -> list[StepState | str]:
    seen = list[StepState | str]()
    with attached(recipe) as (model, optimizer, comm), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, call in enumerate(order.split()):
            try:
                if call == "n":
                    with comm.no_sync():
                        loss_of(model, rank, number).backward()
                elif call == "b":
                    loss_of(model, rank, number).backward()
                elif call == "c":
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                elif call == "s":
                    optimizer.step()
                elif call == "z":
                    optimizer.zero_grad()
                else:
                    comm.skip()
            except AttachError as error:
                seen.append("x" if "no_sync()" in str(error) else str(error))
            else:
                seen.append(comm._steps.state)
    return seen


@pytest.mark.parametrize("order", ORDERS)
def test_calls_in_any_order_lead_through_the_states(gang2: Gang, order: str) -> None:
    averaged, local = ORDERS[order]
    assert gang2.run(states_after, order, "allreduce") == [averaged, averaged]
    assert gang2.run(states_after, order, "allreduce + local_sgd(2)") == [local, local]


def turns(rank: int, size: int, recipe: str) -> list[StepState]:
    """Two optimizers, of which each has its turn; in the last step only the first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    seen = list[StepState]()
    with gossamer.attach(model, [first, second], recipe, deadline=20.0) as comm, warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def loss() -> torch.Tensor:
            model.zero_grad()
            out = model(torch.ones(2, 3)).square().sum()
            out.backward()
            return out

        for _ in range(2):
            loss()
            for optimizer in (first, second):
                optimizer.step()
                seen.append(comm._steps.state)
        loss()
        first.step()
        loss()  # before the second had its turn: the step ends
        seen.append(comm._steps.state)
    return seen


def test_a_step_ends_when_all_optimizers_had_their_turn(gang2: Gang) -> None:
    assert gang2.run(turns, "allreduce") == 2 * [[STEPPING, IDLE, STEPPING, IDLE, READY]]
    assert gang2.run(turns, "allreduce + local_sgd(2)")[0][:4] == [STEPPING, IDLE, STEPPING, IDLE]


def skips(rank: int, size: int) -> list[tuple[StepState, int]]:
    """Leave out two steps without a backward pass; in the first the members change."""
    seen = list[tuple[StepState, int]]()
    with attached("allreduce + local_sgd(2)") as (_, _, comm):
        steps = comm.worker.steps

        def lost() -> Program[None]:
            yield from ()
            raise MembersChanged("a rank is lost")

        for way in (lost, steps):
            comm.worker.steps = way  # type: ignore[method-assign]
            comm.skip()
            seen.append((comm._steps.state, comm.step))
        comm.worker.steps = steps  # type: ignore[method-assign]
    return seen


def test_a_step_that_was_dropped_can_be_left_out(gang2: Gang) -> None:
    assert gang2.run(skips) == 2 * [[(StepState.DROPPED, 0), (IDLE, 1)]]


def rests(rank: int, size: int, recipe: str, says_so: bool) -> tuple[str, torch.Tensor, float]:
    """Two steps of two optimizers, of which the first rests."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    said = ""
    with gossamer.attach(model, [first, second], recipe, deadline=20.0) as comm, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for _ in range(2):
                model.zero_grad()
                model(torch.ones(2, 3)).square().sum().backward()
                second.step()
                if says_so:
                    comm.skip()
        except AttachError as error:
            said = str(error)
        return said, flat(model), comm.metrics()["residual_norm"]


def test_a_step_in_which_an_optimizer_rests_is_not_ended_by_a_write_in_the_midst_of_backward(gang2: Gang) -> None:
    shrinking = "allreduce + every_step(l1=0.01)"
    for said, _, _ in gang2.run(rests, shrinking, False):
        assert "call comm.skip() on all ranks before the next forward" in said
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    second = torch.optim.SGD(model[1].parameters(), lr=0.1)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        second.step()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(nn.functional.softshrink(p, 0.001))
    for said, found, _ in gang2.run(rests, shrinking, True):
        assert said == ""
        torch.testing.assert_close(found, flat(model))


def test_a_step_of_which_an_optimizer_is_left_out_keeps_what_it_owes(gang2: Gang) -> None:
    for said, _, owed in gang2.run(rests, "topk(ratio=0.3)", True):
        assert said == ""
        assert owed > 0
