"""More members than at the start, and fewer: seats given by the store, and clocks that tell other times."""

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from tests.gang import free_port
from tests.integrations.last_step import LastStep, end_with
from tests.integrations.test_members import Learners, hold, is_enough, made_by
from tests.marked import wait_for
from torch import nn

import gossamer
from gossamer.core.errors import GossamerError, PeerError
from gossamer.fabrics.liveness import store_server
from gossamer.fabrics.liveness.members import Members
from gossamer.integrations import weights

pytestmark = pytest.mark.gang

MOST, SAMPLES, FAR = 4, 12, 12
LAST = (0, 2)  # who is left in the end where shares are planned
SPEED = {0: 1.0, 1: 2.0, 2: 3.0}  # samples a second


def another_clock() -> None:
    """This machine is a day ahead, and was started in another year."""
    now, monotonic = time.time, time.monotonic
    time.time = lambda: now() + 86_400.0
    time.monotonic = lambda: monotonic() + 1e7


def learn_by_seat(number: int, least: int, port: int, recipe: str, silence: float, how: str, pipe: Connection) -> None:
    """A user's loop without RANK; it says which seat it got, and at every change who is there and what its share is."""
    if how == "another clock":
        another_clock()
    torch.set_num_threads(1)
    torch.manual_seed(number)
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    try:
        group = gossamer.members(silence, least=least, most=MOST, store=f"127.0.0.1:{port}")
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            comm = gossamer.attach(model, optimizer, recipe, group, deadline=30.0)
            pipe.send((comm.rank, comm.size, comm.present, comm.step, [p.pid for p in store_server._started]))
            steps, shares, seen = [comm.step], list[tuple[tuple[int, ...], int]](), 0
            while comm.step < 20 or not is_enough(group):
                # All plan together, now and then: who is done must not leave the others waiting for its plan.
                if how == "shares" and (not shares or shares[-1][0] != LAST):
                    share = comm.share(SAMPLES, seconds=1 / SPEED[comm.rank])
                    if not shares or shares[-1] != (comm.present, share):
                        shares.append((comm.present, share))
                        group.store.raise_flag(f"planned/{comm.rank}/{comm.present}", "")
                x = torch.randn(4, 8)
                optimizer.zero_grad()
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
                steps.append(comm.step)
                if len(comm.present) != seen:
                    seen = len(comm.present)
                    with suppress(RuntimeError):  # the store is gone; training tells
                        group.store.raise_flag(f"sees/{comm.rank}/{seen}", "")
                time.sleep(0.005)
            comm.finish()
            told = [str(w.message).partition(": ")[2] for w in caught if w.category is RuntimeWarning]
        flat = torch.cat([p.detach().view(-1) for p in model.parameters()])
        pipe.send((steps, flat.tolist(), told, comm.present, (comm.rank, comm.size), shares))
    except GossamerError as error:
        pipe.send(error)


@pytest.fixture
def learners() -> Iterator[Callable[..., Learners]]:
    yield from made_by(loop=learn_by_seat)


def test_two_start_two_more_come_and_one_is_left(learners: Callable[..., Learners]) -> None:
    store = hold()
    crew, everybody = learners(2, store.port, "decoupled_diloco(4)", 3.0), Members(store, None, MOST)

    def see(ranks: tuple[int, ...], count: int) -> None:
        keys = [f"sees/{rank}/{count}" for rank in ranks]
        wait_for(lambda: everybody.store.are_there(keys), what=lambda: f"{everybody.latest()}, {everybody.beats()}")

    crew.start(10)
    crew.start(11, dies="another clock")
    began = {number: crew.hear(number) for number in (10, 11)}
    assert {told[0] for told in began.values()} == {0, 1}
    assert {told[1:4] for told in began.values()} == {(MOST, (0, 1), 0)}
    see((0, 1), 2)
    crew.start(12)
    crew.start(13, dies="another clock")
    came = {number: crew.hear(number) for number in (12, 13)}
    assert {told[0] for told in came.values()} == {2, 3}
    see((0, 1, 2, 3), 4)
    seats = {told[0]: number for number, told in (began | came).items()}
    for rank in (0, 1, 3):
        crew.processes[seats[rank]].kill()
        crew.processes[seats[rank]].join()
    see((2,), 1)
    crew.start(14)  # the seat of a dead member is given again
    assert crew.hear(14)[0] == 0
    see((0, 2), 2)
    everybody.store.raise_flag("enough", "")
    steps, flat, told, present, own, _ = crew.hear(seats[2])
    assert steps == [*range(steps[0], steps[0] + len(steps))]
    assert own == (2, MOST)
    assert present == (0, 2)
    assert sorted(told)[:2] == ["rank 0 is back", "rank 0 is lost; the others go on, and it may come back"]
    _, other, told, present, own, _ = crew.hear(14)
    assert (present, own) == ((0, 2), (0, MOST))
    assert other == flat


def test_shares_follow_who_is_there(learners: Callable[..., Learners]) -> None:
    store = hold()
    crew, everybody = learners(2, store.port, "decoupled_diloco(4)", 3.0), Members(store, None, MOST)

    def have_planned(*ranks: int) -> None:
        keys = [f"planned/{rank}/{ranks}" for rank in ranks]
        wait_for(lambda: everybody.store.are_there(keys), what=lambda: f"{everybody.latest()}, {everybody.beats()}")

    for number in (10, 11):
        crew.start(number, dies="shares")
    seats = {crew.hear(number)[0]: number for number in (10, 11)}
    have_planned(0, 1)
    crew.start(12, dies="shares")
    seats |= {crew.hear(12)[0]: 12}
    have_planned(0, 1, 2)
    crew.processes[seats[1]].kill()
    crew.processes[seats[1]].join()
    have_planned(*LAST)
    everybody.store.raise_flag("enough", "")
    outcomes = {rank: crew.hear(seats[rank]) for rank in (0, 2)}
    assert outcomes[0][-1] == [((0, 1), 4), ((0, 1, 2), 2), ((0, 2), 3)]
    assert outcomes[2][-1] == [((0, 1, 2), 6), ((0, 2), 9)]
    assert outcomes[0][1] == outcomes[2][1]


def die_in_a_plan(comm: gossamer.Communicator) -> None:
    """Kill this process when it is about to plan shares, for which the others wait."""
    share_out = weights.share_out

    def dying(*args: Any) -> Any:
        if comm.step >= FAR:
            os.kill(os.getpid(), signal.SIGKILL)
        return share_out(*args)

    weights.share_out = dying  # type: ignore[assignment]


def learn_by_shares(
    number: int, least: int, port: int, recipe: str, silence: float, how: str, pipe: Connection
) -> None:
    """A user's loop that plans shares after each step, when who has just come is not there."""
    torch.set_num_threads(1)
    torch.manual_seed(number)
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    warnings.simplefilter("ignore", RuntimeWarning)
    try:
        group = gossamer.members(silence, least=least, most=MOST, store=f"127.0.0.1:{port}")
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        comm, shares = gossamer.attach(model, optimizer, recipe, group, deadline=30.0), set[tuple[int, int]]()
        pipe.send(comm.step)
        if how:
            die_in_a_plan(comm)
        end = LastStep(comm, group.store, comm.rank)
        while not end.is_over():
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            share = comm.share(SAMPLES, seconds=1.0)
            shares.add((len(comm.present), share))
            time.sleep(0.005)
        comm.finish()
        flat = torch.cat([p.detach().view(-1) for p in model.parameters()])
        pipe.send((shares, flat.tolist(), comm.present))
    except GossamerError as error:
        pipe.send(error)


@pytest.fixture
def sharers() -> Iterator[Callable[..., Learners]]:
    yield from made_by(loop=learn_by_shares)


@pytest.mark.parametrize("recipe", ["topk", pytest.param("local_sgd(4)", marks=pytest.mark.slow)])
def test_one_is_lost_while_shares_are_planned_and_comes_back_where_it_does_not_plan(
    sharers: Callable[..., Learners], recipe: str
) -> None:
    store = hold()
    crew, everybody = sharers(3, store.port, recipe, 5.0), Members(store, None, MOST, least=3)
    for number in (10, 11, 12):
        crew.start(number, dies="dies" if number == 12 else "")
    for number in (10, 11, 12):
        assert crew.hear(number) == 0
    crew.processes[12].join(300.0)
    wait_for(lambda: len(everybody.latest().ranks) == 2, what=lambda: f"{everybody.latest()}")
    crew.start(13)
    assert crew.hear(13) >= FAR
    end_with(everybody.store, 3)
    outcomes = [crew.hear(number) for number in (10, 11, 13)]
    assert all(isinstance(each, tuple) for each in outcomes), outcomes
    assert [shares for shares, *_ in outcomes] == [{(3, 4), (2, 6)}, {(3, 4), (2, 6)}, {(3, 4)}]
    assert all(each[1:] == (outcomes[0][1], (0, 1, 2)) for each in outcomes)


def test_who_comes_with_another_recipe_is_refused_and_the_others_go_on(learners: Callable[..., Learners]) -> None:
    store = hold()
    crew, everybody = learners(1, store.port, "decoupled_diloco(4)", 3.0), Members(store, None, MOST)
    crew.start(10)
    assert crew.hear(10)[0] == 0
    crew.recipe = "decoupled_diloco(8)"
    crew.start(11)
    refused = crew.hear(11)
    assert isinstance(refused, GossamerError)
    assert "its set-up differs" in str(refused)
    assert "quorum_rounds(4" in str(refused)
    crew.recipe = "decoupled_diloco(4)"
    wait_for(lambda: everybody.latest().ranks == (0,))
    crew.start(12)
    assert crew.hear(12)[:3] == (1, MOST, (0, 1))
    everybody.store.raise_flag("enough", "")
    assert crew.hear(10)[1] == crew.hear(12)[1]


def test_where_no_store_answers_the_first_starts_one_and_without_it_all_are_told(
    learners: Callable[..., Learners],
) -> None:
    crew = learners(2, free_port(), "decoupled_diloco(4)", 3.0)
    for number in (10, 11):
        crew.start(number)
    began = [crew.hear(number) for number in (10, 11)]
    assert {told[0] for told in began} == {0, 1}
    holders = [pid for told in began for pid in told[4]]
    assert holders
    for pid in holders:  # of two that were started at once, one has found the port taken
        os.kill(pid, signal.SIGKILL)
    for number in (10, 11):
        error = crew.hear(number)
        assert isinstance(error, PeerError)
        assert "the store that holds the list of members does not answer" in str(error)
