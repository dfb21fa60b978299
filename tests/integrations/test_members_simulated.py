"""What the simulator computes when a rank dies and comes back is what real processes compute, bit for bit."""

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
import torch
from tests.integrations.loops import SEED, SMALL, Awkward, flat, loss_of, same, usual
from tests.integrations.test_members import Learners, hold, made_by
from tests.marked import wait_for
from torch import Tensor, nn

import gossamer
from gossamer.core.errors import GossamerError
from gossamer.core.verbs import Present
from gossamer.costs import from_flags
from gossamer.costs.events import Absence, Begin, Events
from gossamer.fabrics.liveness.members import Members
from gossamer.integrations import Communicator
from gossamer.integrations.regrouping import Regrouping
from gossamer.planning.model_shapes import from_shapes
from gossamer.planning.work import NoWork
from gossamer.simulate import costs_on
from gossamer.simulated_members import MemberCrew, MembersRun, MemberTimes, starting, train

pytestmark = pytest.mark.gang

SIZE, DIES, BACK, END = 3, 5, 8, 12  # ranks; rank 1 dies in step 5, and is let in at the end of step 8
LOST = 1
SILENCE = 3.0
RESTS = "before the return"


def come_to_rest(comm: Communicator, group: Members, what: str) -> None:
    """Wait until on all ranks everything that they have started has come to its end."""
    wait_for(lambda: all(handle.done() for handle in comm.worker.in_flight.handles))
    group.store.raise_flag(f"{what}/{comm.rank}", "")
    wait_for(lambda: group.store.are_there([f"{what}/{rank}" for rank in comm.present]))


def meet_after(step: int, comm: Communicator, group: Members) -> None:
    """Let a rank in after this step, and when everything that was started in it has come to its end."""
    between_steps = Regrouping.between_steps

    def waiting(regrouping: Regrouping) -> None:
        if comm.step == step and len(comm.present) < SIZE:
            come_to_rest(comm, group, RESTS)
            wait_for(lambda: group.is_called)
        between_steps(regrouping)

    Regrouping.between_steps = waiting  # type: ignore[method-assign]


def has_ended(comm: Communicator) -> bool:
    """True if a connection to another rank has ended; not if none is open."""
    try:
        comm.fabric.session.lanes["comm"].driver._world.look()  # pyright: ignore[reportPrivateUsage]
    except RuntimeError:
        return True
    return False


def learn(rank: int, size: int, port: int, recipe: str, silence: float, dies: str, pipe: Connection) -> None:
    """A user's loop in which the moments of the loss and of the return are made the same on all ranks.

    The loss is in the midst of a step: what was sent before has arrived on all ranks, and nothing is sent in it before they
    see it. Else a rank's last messages may or may not be lost with it, and models differ from run to run. At the return
    everything that was sent has arrived, too.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    group, model = gossamer.members(silence), Awkward()
    optimizer = usual(recipe)(model)
    try:
        comm = gossamer.attach(model, optimizer, recipe, group, seed=SEED, deadline=30.0)
        meet_after(BACK, comm, group)
        steps = [comm.step]
        while comm.step < END:
            if comm.step + 1 == DIES and len(comm.present) == size:
                come_to_rest(comm, group, "before the loss")
                if dies:
                    os.kill(os.getpid(), signal.SIGKILL)
                wait_for(lambda: has_ended(comm))
            optimizer.zero_grad()
            loss_of(model, rank, comm.step + 1).backward()
            optimizer.step()
            steps.append(comm.step)
        found = flat(model)
        dropped = comm.dropped
        comm.detach()
        pipe.send((steps, dropped, found.tolist()))
    except GossamerError as error:
        pipe.send(error)


@pytest.fixture
def learners() -> Iterator[Callable[..., Learners]]:
    yield from made_by(loop=learn)


def really(learners: Callable[..., Learners], recipe: str) -> list[tuple[list[int], list[int], list[float]]]:
    store = hold()
    ranks, members = learners(SIZE, store.port, recipe, SILENCE), Members(store, 0, SIZE)
    for rank in range(SIZE):
        ranks.start(rank, dies="dies" if rank == LOST else "")
    ranks.processes[LOST].join(300.0)
    wait_for(lambda: members.store.are_there([f"{RESTS}/{rank}" for rank in (0, 2)]))
    ranks.start(LOST)
    outcomes = [ranks.hear(rank) for rank in range(SIZE)]
    assert all(isinstance(each, tuple) for each in outcomes), outcomes
    return outcomes


def simulated(recipe: str, *absences: Absence) -> MembersRun:
    shapes = {name: tuple(p.shape) for name, p in Awkward().named_parameters()}
    costs = costs_on(
        from_flags(nodes=SIZE, rate=1e8), recipe, from_shapes(shapes, 0.1, name="awkward", memory_rate=1e10), NoWork()
    )

    def backward(model: nn.Module, present: Present, step: int) -> float:
        loss = loss_of(model, present.ranks[present.place], step)
        loss.backward()
        return loss.item()

    crew = MemberCrew(starting(recipe, Awkward, usual(recipe), SIZE, SEED), backward, costs)
    return train(crew, SIZE, END, Events(absences=absences), times=MemberTimes(look=0.0))


def within(step: int, run: MembersRun) -> float:
    """A moment of the virtual clock at which all ranks are in the midst of a step."""
    return (run.moments[step - 2] + run.moments[step - 1]) / 2


def simulated_like_the_real_one(recipe: str) -> MembersRun:
    """Rank 1 is lost in the midst of a step, and comes in the midst of another."""
    begin = Begin(seconds=within(DIES, simulated(recipe)))
    gone = simulated(recipe, Absence(LOST, float("inf"), begin=begin))
    return simulated(recipe, Absence(LOST, within(BACK, gone) - begin.seconds, begin=begin))


def models(run: MembersRun) -> list[Tensor]:
    return [replica.flat() for replica in run.replicas.values()]


def slow(recipe: str) -> object:
    return pytest.param(recipe, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "recipe",
    [
        "gather(topk(ratio=0.2)) + error_feedback()" + SMALL,
        "scatter(qsgd(bits=4, bucket=16)) + streaming(3, fragments=3, delay=2)" + SMALL,
        slow("scatter(qsgd(bits=4, bucket=16)) + slowmo(3)" + SMALL),
        slow("scatter(qsgd(bits=4, bucket=16)) + slowmo(3, beta=0.9, alpha=0.7, by_lr=False, nesterov=True)" + SMALL),
        slow("scatter(qsgd(bits=4, bucket=16))" + SMALL),
        slow("scatter(qsgd(bits=4, bucket=16)) + delayed()" + SMALL),
        slow("sgp" + SMALL),
        slow("osgp" + SMALL),
        slow("scatter(qsgd(bits=4, bucket=16)) + overlap_local_sgd(3, delay=1)" + SMALL),
        slow("scatter(qsgd(bits=4, bucket=16)) + cocod(3, delay=1)" + SMALL),
    ],
)
def test_a_rank_dies_and_comes_back_to_the_same_models(learners: Callable[..., Learners], recipe: str) -> None:
    run, real = simulated_like_the_real_one(recipe), really(learners, recipe)
    assert [change.came for change in run.changes] == [(), (LOST,)]
    assert run.changes[-1].step == BACK + 1
    assert real[LOST][0][0] == BACK
    assert [len(dropped) for _, dropped, _ in real] == [run.dropped // 2, 0, run.dropped // 2]
    for one, (_, _, found) in zip(models(run), real, strict=True):
        assert same(one, torch.tensor(found, dtype=torch.float32))
