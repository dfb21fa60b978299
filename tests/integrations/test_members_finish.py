"""A rank dies in the last collectives of `finish()`, and another has not got their answer: all who are left end with one model.

That a rank is ahead of another is a matter of microseconds, so here one takes part in a collective and is told that it failed.
"""

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.last_step import LastStep, end_with
from tests.integrations.loops import flat
from tests.integrations.test_members import Learners, hold, made_by
from tests.marked import wait_for
from torch import nn

import gossamer
from gossamer.core.errors import GossamerError
from gossamer.fabrics.liveness.members import Members
from gossamer.fabrics.torch import gloo
from gossamer.integrations import consensus

pytestmark = pytest.mark.gang

STEPS = 14  # within a round: models differ
VOTES, MODEL = "votes", "model"


def after(kind: str, turn: int, then: Callable[[], None]) -> None:
    """Do something when this process has come through the `turn`-th collective of a kind from now on."""
    owner, name = (gloo.Gloo, "_all_gather") if kind == VOTES else (gloo, "all_reduce")
    before, count = getattr(owner, name), [0]

    def counting(*args: Any) -> Any:
        answer = before(*args)
        count[0] += 1
        if count[0] == turn:
            then()
        return answer

    setattr(owner, name, counting)


def die() -> None:
    time.sleep(0.3)  # the others are through
    os.kill(os.getpid(), signal.SIGKILL)


def be_told_that_it_failed() -> None:
    time.sleep(1.0)  # the others are through, and have gone on
    raise RuntimeError("Connection closed by peer")


def begin(rank: int, size: int, port: int, silence: float) -> tuple[Members, nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    warnings.simplefilter("ignore", RuntimeWarning)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    return gossamer.members(silence), model, torch.optim.SGD(model.parameters(), lr=0.05)


def learn(rank: int, size: int, port: int, recipe: str, silence: float, how: str, pipe: Connection) -> None:
    group, model, optimizer = begin(rank, size, port, silence)
    try:
        comm = gossamer.attach(model, optimizer, recipe, group, deadline=30.0)
        while comm.step < STEPS:
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        own = flat(model).tolist()
        kind, _, turn = how.partition(" ")
        if how and rank:
            after(kind, int(turn), die if rank == 2 else be_told_that_it_failed)
        comm.finish()
        pipe.send((own, flat(model).tolist(), comm.present))
    except GossamerError as error:
        pipe.send(error)


@pytest.fixture
def learners() -> Iterator[Callable[..., Learners]]:
    yield from made_by(loop=learn)


# The votes: who has the consensus, before it and after it; between them each says whether its model is finite.
@pytest.mark.parametrize(
    ("recipe", "how"),
    [
        ("local_sgd(8)", f"{MODEL} 1"),
        ("local_sgd(8)", f"{VOTES} 3"),
        pytest.param("sgp", f"{VOTES} 3", marks=pytest.mark.slow),
        pytest.param("decoupled_diloco(8)", f"{VOTES} 3", marks=pytest.mark.slow),
    ],
)
def test_who_was_ahead_and_who_was_behind_end_with_one_model(
    learners: Callable[..., Learners], recipe: str, how: str
) -> None:
    store = hold()
    crew = learners(3, store.port, recipe, 5.0)
    for rank in range(3):
        crew.start(rank, dies=how)
    outcomes = [crew.hear(rank) for rank in (0, 1)]
    assert all(isinstance(each, tuple) for each in outcomes), outcomes
    (own, mine, _), (other, theirs, present) = outcomes
    assert own != other
    assert mine == theirs
    assert mine not in (own, other)
    assert 2 not in present


def learn_at_own_pace(rank: int, size: int, port: int, recipe: str, silence: float, how: str, pipe: Connection) -> None:
    """A loop in which the last rank is far behind the others, and looks at the consensus when they have looked."""
    group, model, optimizer = begin(rank, size, port, silence)
    try:
        comm, looked = gossamer.attach(model, optimizer, recipe, group, deadline=30.0), list[list[float]]()
        for _ in range(2):
            until = comm.step + STEPS
            while comm.step < until:
                optimizer.zero_grad()
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
                time.sleep(0.05 if rank == size - 1 else 0.0)
            with comm.consensus():
                looked.append(flat(model).tolist())
        comm.finish()
        pipe.send((looked, flat(model).tolist()))
    except GossamerError as error:
        pipe.send(error)


@pytest.fixture
def apart() -> Iterator[Callable[..., Learners]]:
    yield from made_by(loop=learn_at_own_pace)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_who_ends_first_answers_the_rounds_of_those_who_still_train(apart: Callable[..., Learners], size: int) -> None:
    """Their quorum is larger than the number of those who do."""
    store = hold()
    crew = apart(size, store.port, "allreduce + quorum_rounds(4, quorum=2)", 5.0)
    for rank in range(size):
        crew.start(rank)
    outcomes = [crew.hear(rank, 120.0) for rank in range(size)]
    assert all(isinstance(each, tuple) for each in outcomes), outcomes
    (looked, end), *others = outcomes
    assert looked[0] != looked[1]
    assert all(each == (looked, end) for each in others)


# -- one comes where the others look at the consensus ----------------------------------------------------------------------

LOOKS_AT = 10  # a step of all, in the midst of a round
AT_ITS_STEP, WITHIN = "has come at the end of that step", "comes while they wait for one another"
SAVING, BEHIND = "comes while they save in ", "comes while one waits and the other is not there yet"


def hold_up(group: Members) -> None:
    """Average no models before another rank asks to be let in."""
    swap_in = consensus.swap_in

    def late(*args: Any) -> Any:
        consensus.swap_in = swap_in
        group.store.raise_flag("comes", "")
        wait_for(lambda: group.latest().number > group.epoch.number)
        return swap_in(*args)

    consensus.swap_in = late  # type: ignore[assignment]


def learn_and_look(rank: int, size: int, port: int, recipe: str, silence: float, how: str, pipe: Connection) -> None:
    """A user's loop that looks at the consensus after a step, and compares ranks; rank 2 is late, and not there."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    group = gossamer.members(silence, least=2, most=size, store=f"127.0.0.1:{port}")
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            comm, shown = gossamer.attach(model, optimizer, recipe, group, deadline=60.0), list[bool]()
            if how.startswith((WITHIN, SAVING)) and rank == 0:
                hold_up(group)
            end = LastStep(comm, group.store, rank)
            while not end.is_over():
                if how == BEHIND and comm.step == LOOKS_AT - 2 and rank == 0:
                    wait_for(lambda: group.is_called)
                optimizer.zero_grad()
                model(torch.randn(4, 8)).square().mean().backward()
                if how == AT_ITS_STEP and comm.step == LOOKS_AT - 1 and rank < 2:
                    group.store.raise_flag("comes", "")
                    wait_for(lambda: group.is_called)
                optimizer.step()
                if comm.step == LOOKS_AT and how.startswith(SAVING):
                    gossamer.checkpoint.save(comm, how.removeprefix(SAVING))
                    shown.append(Path(how.removeprefix(SAVING), ".metadata").exists())
                elif comm.step == LOOKS_AT:
                    if how == BEHIND and rank == 1:
                        group.store.raise_flag("comes", "")
                    own = flat(model).tolist()
                    with comm.consensus():
                        shown.append(comm.shows_consensus or flat(model).tolist() != own)
                    comm.check_sync()
                time.sleep(0.005)
            comm.finish()
            told = [str(w.message).partition(": ")[2] for w in caught if w.category is RuntimeWarning]
        pipe.send((shown, told, comm.present, flat(model).tolist()))
    except GossamerError as error:
        pipe.send(error)


@pytest.fixture
def lookers() -> Iterator[Callable[..., Learners]]:
    yield from made_by(loop=learn_and_look)


@pytest.mark.parametrize(
    ("recipe", "how"),
    [
        ("local_sgd(8)", AT_ITS_STEP),
        ("local_sgd(8)", WITHIN),
        ("local_sgd(8)", SAVING),
        ("allreduce + streaming(6, fragments=2, delay=4)", BEHIND),
        *(pytest.param(r, how, marks=pytest.mark.slow) for r in ("topk", "sgp") for how in (AT_ITS_STEP, WITHIN)),
    ],
)
def test_who_comes_between_two_steps_does_not_disturb_what_the_others_do_there(
    lookers: Callable[..., Learners], recipe: str, how: str, tmp_path: Path
) -> None:
    """It takes the next step, while they would wait for its vote."""
    store = hold()
    crew, everybody = lookers(3, store.port, recipe, 5.0), Members(store, 0, 3)
    for rank in (0, 1):
        crew.start(rank, dies=f"{how}{tmp_path}" if how == SAVING else how)
    wait_for(lambda: everybody.store.flag_is_up("comes"))
    crew.start(2)
    wait_for(lambda: everybody.latest().ranks == (0, 1, 2))
    end_with(everybody.store, 3)
    outcomes = [crew.hear(rank) for rank in range(3)]
    assert all(isinstance(each, tuple) for each in outcomes), outcomes
    assert [shown for shown, *_ in outcomes] == [[False], [False], []]
    assert all((present, model) == ((0, 1, 2), outcomes[0][3]) for *_, present, model in outcomes)
    for _, told, *_ in outcomes[:2]:
        said = [t.partition("not here: ")[2] for t in told if "not here: " in t]
        assert said == ["the model is this rank's own", *(["ranks are not compared"] if how != SAVING else [])]


# -- one dies while the others wait for its messages -----------------------------------------------------------------------

STATE = "asks for its state"


def learn_and_rest(rank: int, size: int, port: int, recipe: str, silence: float, how: str, pipe: Connection) -> None:
    """A user's loop that uses the network for itself after each step."""
    group, model, optimizer = begin(rank, size, port, silence)
    try:
        comm = gossamer.attach(model, optimizer, recipe, group, deadline=30.0)
        while comm.step < 2 * STEPS:
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            if rank == 2 and comm.step == STEPS:
                time.sleep(1.0)  # the others wait
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            if how == STATE:
                assert comm.state_dict()["step"] == comm.step + 1
            else:
                comm.quiet()
        comm.finish()
        pipe.send((comm.present, flat(model).tolist()))
    except GossamerError as error:
        pipe.send(error)


@pytest.fixture
def resters() -> Iterator[Callable[..., Learners]]:
    yield from made_by(loop=learn_and_rest)


@pytest.mark.parametrize("how", ["", STATE])
def test_who_waits_for_messages_of_one_that_dies_waits_for_those_who_are_left(
    resters: Callable[..., Learners], how: str
) -> None:
    store = hold()
    crew = resters(3, store.port, "osgp", 5.0)
    for rank in range(3):
        crew.start(rank, dies=how)
    outcomes = [crew.hear(rank) for rank in (0, 1)]
    assert all(isinstance(each, tuple) for each in outcomes), outcomes
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == (0, 1)
