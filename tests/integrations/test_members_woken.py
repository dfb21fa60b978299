"""A rank is frozen in the midst of an average, counted as lost, and wakes up: what it gave then meets nobody."""

import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import pytest
import torch
from tests.integrations.test_members import Learners, hold, made_by
from tests.marked import wait_for
from torch import Tensor, nn

import gossamer
from gossamer.core.errors import GossamerError
from gossamer.core.verbs import Program
from gossamer.fabrics.liveness.members import Members
from gossamer.fabrics.torch.driver import NetworkDriver
from gossamer.runtime.averaging import Averaging

pytestmark = pytest.mark.gang

FROZEN_AT = 24  # the step of the average: the end of a round of 4, 6 and 8 steps
PAST = FROZEN_AT + 10
SILENCE, LONG = 4.0, 240.0  # seconds; a busy machine may take long, but what a test waits for comes
SLEEPER = 2
BEFORE, BETWEEN, AFTER, BUFFERS = "before its messages", "between two messages", "after its messages", "sharing buffers"
STOPPED = "with an answer that its program has not got yet"
CONSENSUS, LOOKS_AT = "in the consensus", FROZEN_AT + 2


class Average(NamedTuple):
    """One average of a rank: at which step it was launched, what the rank gave, and the mean."""

    step: int
    bucket: int
    given: list[float]
    mean: list[float]


class Outcome(NamedTuple):
    """What a rank has seen."""

    steps: list[int]
    model: list[float]
    presences: Sequence[tuple[Sequence[int], Sequence[int]]]  # who was lost, and who came back
    present: tuple[int, ...]
    dropped: int
    averages: list[Average]
    gave: list[tuple[int, list[float]]]  # at which step, and what


def freeze(moment: str, step: int) -> None:
    """Stop this process at a moment of the average of a step, once."""
    cross, drive, done = NetworkDriver._cross, NetworkDriver.drive, list[str]()

    def reaches(here: str) -> None:
        done.append(here)
        if done.count(moment) == 1 and here == moment:
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.1)  # the signal has come

    def crossing(driver: NetworkDriver, group: Any, verb: Any, handle: Any) -> Any:
        if handle.step == step and handle.by_itself:
            reaches(BUFFERS)
        elif handle.step == step:
            reaches(BETWEEN if BEFORE in done else BEFORE)
        if handle.step == LOOKS_AT and handle.label == "comm.consensus":
            reaches(CONSENSUS)
        answer = cross(driver, group, verb, handle)
        if handle.step == step and not handle.by_itself and STOPPED not in done:
            reaches(STOPPED)
            if moment == STOPPED:
                handle.lane.halt.wait(LONG)  # until its training thread has seen that the others have met anew
        return answer

    def driving(driver: NetworkDriver, handle: Any, halt: Any) -> Any:
        result = drive(driver, handle, halt)
        if handle.step == step and not handle.by_itself:
            reaches(AFTER)
        return result

    NetworkDriver._cross, NetworkDriver.drive = crossing, driving  # type: ignore[method-assign]


def note_averages(notes: list[Average], gave: list[tuple[int, list[float]]]) -> None:
    """Note what is launched, and each average that is landed."""
    launch, land, given = Averaging.launch, Averaging.land, dict[int, tuple[int, int, list[float]]]()

    def launching(self: Averaging, which: Sequence[int], values: Sequence[Tensor], over: Any = None) -> Program[None]:
        for index, value in zip(which, values, strict=True):
            given[index] = self.taken, self._worker.step, value.tolist()
            gave.append(given[index][1:])
        yield from launch(self, which, values, over)

    def landing(self: Averaging, which: Sequence[int]) -> Program[list[Tensor] | None]:
        means = yield from land(self, which)
        for index, mean in zip(which, means or ()):
            taken, step, values = given.pop(index, (-1, 0, []))
            if taken == self.taken:  # else the average was handed over, in flight
                notes.append(Average(step, index, values, mean.tolist()))
        return means

    Averaging.launch, Averaging.land = launching, landing  # type: ignore[method-assign]


def learn(rank: int, size: int, port: int, recipe: str, silence: float, moment: str, pipe: Connection) -> None:
    """A user's loop, up to a step that rank 0 chooses when the test has seen enough."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    group, notes, gave = gossamer.members(silence), list[Average](), list[tuple[int, list[float]]]()
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    note_averages(notes, gave)
    if rank == SLEEPER:
        freeze(moment, FROZEN_AT)
    warnings.simplefilter("ignore", RuntimeWarning)
    try:
        buffers = "local" if "decoupled" in recipe or recipe == "sgp" else "average"
        comm = gossamer.attach(model, optimizer, recipe, group, deadline=LONG, buffers=buffers)
        pipe.send(comm.step)
        steps, until = [comm.step], None
        while until is None or comm.step < until:
            x = torch.randn(4, 8)
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            if moment == CONSENSUS and comm.step == LOOKS_AT:
                with comm.consensus():
                    pass
            steps.append(comm.step)
            if comm.step == PAST:
                group.store.raise_flag(f"past/{rank}", "")
            until = until or ends_at(group, rank, comm)
            time.sleep(0.005)
        if not comm.recipe.schedule.shape.is_async:
            comm.check_sync()  # compares anchors too
        dropped = len(comm.dropped)
        comm.finish()
        presences = [(p.lost, p.back) for p in comm.ledger.presences]
        flat = torch.cat([p.detach().view(-1) for p in model.parameters()]).tolist()
        pipe.send(Outcome(steps, flat, presences, comm.present, dropped, notes, gave))
    except GossamerError as error:
        pipe.send(error)


def ends_at(group: Members, rank: int, comm: gossamer.Communicator) -> int | None:
    """The step at which all end. Rank 0 says it once all are there, in time: no rank is a whole round ahead."""
    if rank == 0 and len(comm.present) == comm.size and group.store.flag_is_up("enough"):
        group.store.raise_flag("until", str((comm.step // 24 + 3) * 24 + 2))
    return int(group.store.read(["until"])[0]) if group.store.flag_is_up("until") else None


@pytest.fixture
def learners() -> Iterator[Callable[..., Learners]]:
    yield from made_by(loop=learn)


class Sleepers:
    """Three ranks that train, and the list of members."""

    def __init__(self, learners: Callable[..., Learners], recipe: str, moment: str = "") -> None:
        self._store = hold()
        self.all, self.members = learners(3, self._store.port, recipe, SILENCE), Members(self._store, 0, 3)
        for rank in range(3):
            self.all.start(rank, dies=moment)
        for rank in range(3):
            assert self.all.hear(rank, LONG) == 0

    def stands_still(self, rank: int) -> None:
        """Wait until the others go on without a rank that is frozen."""
        others = tuple(r for r in range(3) if r != rank)
        wait_for(lambda: self.members.latest().ranks == others, LONG, lambda: f"{self.members.latest()}")

    def wakes(self, rank: int) -> None:
        """Let it go on, and wait until it is back."""
        before = self.members.latest().number
        os.kill(self.all.processes[rank].pid, signal.SIGCONT)
        wait_for(lambda: self.members.latest().number > before, LONG, lambda: f"{self.members.latest()}")
        wait_for(lambda: len(self.members.latest().ranks) == 3, LONG, lambda: f"{self.members.latest()}")

    def end(self) -> list[Outcome]:
        self.members.store.raise_flag("enough", "")
        outcomes = [self.all.hear(rank, LONG) for rank in range(3)]
        assert all(isinstance(each, Outcome) for each in outcomes), outcomes
        return outcomes


def check_averages(outcomes: Sequence[Outcome], exact: bool) -> None:
    """All who have an average have the same mean; an exact one is that of what they gave at that very step."""
    found = dict[tuple[int, int], list[Average]]()
    for one in outcomes:
        for each in one.averages:
            found.setdefault((each.step, each.bucket), []).append(each)
    assert found
    for one in outcomes:  # what is given to the average of a step is given to no other one
        steps = {(step, tuple(values)) for step, values in one.gave if any(values)}
        assert len(steps) == len({values for _, values in steps})
    for (step, _), same in found.items():
        assert all(each.mean == same[0].mean for each in same), step
        if exact:
            mean = torch.tensor([each.given for each in same]).mean(0)
            torch.testing.assert_close(mean, torch.tensor(same[0].mean), rtol=1e-4, atol=1e-6)


def check_steps(outcomes: Sequence[Outcome], sleeper: int, gossip: bool) -> None:
    """The others' steps go on one by one, but that in gossip who is behind goes on with those ahead."""
    for rank, one in enumerate(outcomes):
        assert one.present == (0, 1, 2)
        assert one.model == outcomes[0].model
        strides = [after - before for before, after in zip(one.steps, one.steps[1:])]
        if rank == sleeper:
            assert min(strides) >= 0
            assert [stride for stride in strides if stride > 1]
        else:
            assert {*strides} <= {0, 1} or gossip
            assert strides.count(0) == one.dropped <= 2
            assert [lost for lost, _ in one.presences if lost] == [[sleeper]]
            assert [back for _, back in one.presences if back] == [[sleeper]]


ROUNDS = ["local_sgd(4)", "slowmo(4)", "bmuf(4, momentum=0.5)", "diloco(8)", "scatter(qsgd()) + local_sgd(4)"]
AT_EVERY_STEP = ["scatter(qsgd())", "topk"]
IN_FLIGHT = ["streaming_diloco(8, delay=8)", "allreduce + overlap_local_sgd(6, delay=4)"]
QUICK = [("local_sgd(4)", BEFORE)]
CASES = [
    *((recipe, moment) for recipe in (*ROUNDS, *AT_EVERY_STEP, *IN_FLIGHT) for moment in (BEFORE, AFTER)),
    *((recipe, BETWEEN) for recipe in ("scatter(qsgd()) + local_sgd(4)", "scatter(qsgd())")),
    *((recipe, BUFFERS) for recipe in ("local_sgd(4)", "topk")),
    *((recipe, STOPPED) for recipe in ("local_sgd(4)", "topk")),
    *((recipe, CONSENSUS) for recipe in ("local_sgd(4)", "streaming_diloco(8, delay=8)", "sgp")),
    *(("decoupled_diloco(4)", moment) for moment in (BEFORE, BETWEEN, AFTER)),
]


@pytest.mark.parametrize(
    ("recipe", "moment"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_a_rank_that_froze_in_an_average_wakes_and_takes_what_the_others_have(
    learners: Callable[..., Learners], recipe: str, moment: str
) -> None:
    crew = Sleepers(learners, recipe, moment)
    crew.stands_still(SLEEPER)
    wait_for(lambda: crew.members.store.are_there(["past/0", "past/1"]), LONG)
    crew.wakes(SLEEPER)
    outcomes = crew.end()
    check_steps(outcomes, SLEEPER, recipe == "sgp")
    if recipe in (
        *ROUNDS,
        *IN_FLIGHT,
    ):  # the others have an average with what was stopped, which the sleeper itself has not
        check_averages(outcomes, exact=recipe in ROUNDS and "qsgd" not in recipe and moment != STOPPED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", ["topk", "scatter(qsgd())", "slowmo(4)", "diloco(8)", *IN_FLIGHT, "sgp", "decoupled_diloco(4)"]
)
def test_ranks_that_freeze_at_random_moments_come_back(learners: Callable[..., Learners], recipe: str) -> None:
    crew, draw = Sleepers(learners, recipe), random.Random(recipe)
    for _ in range(3):
        time.sleep(draw.uniform(0.5, 1.5))
        rank = draw.randrange(3)
        os.kill(crew.all.processes[rank].pid, signal.SIGSTOP)
        crew.stands_still(rank)
        time.sleep(draw.uniform(0.0, 1.0))
        crew.wakes(rank)
    outcomes = crew.end()
    assert all(one.present == (0, 1, 2) and one.model == outcomes[0].model for one in outcomes)
    if recipe in (*ROUNDS, *IN_FLIGHT):
        check_averages(outcomes, exact=recipe in ROUNDS)
