"""Simulated runs under `members()`: ranks are lost, leave and come, and the others go on."""

import random
from collections import defaultdict
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from tests.test_simulated_restarts import CLUSTER, HOSTS, MODEL, net, pull, sgd
from torch import Tensor, nn

from gossamer.core.errors import CostError, GossamerError, PeerError
from gossamer.core.verbs import Present
from gossamer.costs.events import Absence, Begin, Events, LaterStart, SlowSteps
from gossamer.integrations.regrouping import Regrouping
from gossamer.planning.work import NoWork
from gossamer.recipe import Recipe
from gossamer.runtime.averaging import Averaging
from gossamer.simulate import costs_on, replicas
from gossamer.simulate import train as train_undisturbed
from gossamer.simulated_members import MemberBackward, MemberCrew, MembersRun, MemberTimes, starting, train

STEPS = 24
EQUAL = ("allreduce", "qsgd", "topk", "local_sgd(4)", "slowmo(4)", "diloco(8)")  # models are equal after an average
FLIGHTS = (  # anchors are equal after every landing
    "allreduce + streaming(8, fragments=2, delay=3)",
    "scatter(topk(0.1)) + error_feedback() + streaming(6, fragments=2, delay=5) + bucket(0.0002)",
    "gather(qsgd(bits=4)) + diana() + streaming(4, delay=4)",
    "allreduce + streaming(4, fragments=2, delay=0)",
    "allreduce + overlap_local_sgd(6, delay=4)",
    "allreduce + cocod(4)",
    "allreduce + cocod(6, delay=0)",
    "allreduce + overlap_local_sgd(4, delay=0)",
)
MEMBERS = (*EQUAL, *FLIGHTS, "sgp", "decoupled_diloco(8)")
TIMES = MemberTimes(silence=5.0, connecting=0.0)


def backward(model: nn.Module, present: Present, step: int) -> float:
    return pull(model, present.ranks[present.place], step)


def run(
    recipe: str,
    *,
    backward: MemberBackward = backward,
    size: int = 4,
    steps: int = STEPS,
    least: int | None = None,
    times: MemberTimes = TIMES,
    rate: float = HOSTS.up,
    **events: tuple[object, ...],
) -> MembersRun:
    cluster = replace(CLUSTER, hosts=(replace(HOSTS, count=size, up=rate),))
    crew = MemberCrew(starting(recipe, net, sgd, size), backward, costs_on(cluster, recipe, MODEL, NoWork()))
    return train(crew, size, steps, Events(**events), least, times)  # pyright: ignore[reportArgumentType]


def models(done: MembersRun) -> list[Tensor]:
    return [replica.flat() for replica in done.replicas.values()]


def anchors(done: MembersRun) -> list[Tensor]:
    return [
        torch.cat([bucket.states["schedule"]["anchor"] for bucket in replica.worker.buckets])
        for replica in done.replicas.values()
    ]


def all_equal(each: list[Tensor]) -> bool:
    return all(torch.equal(one, each[0]) for one in each)


@pytest.mark.parametrize("recipe", MEMBERS)
def test_without_events_it_is_the_plain_run(recipe: str) -> None:
    plain = train_undisturbed(replicas(recipe, net, sgd, 4), pull, STEPS, costs_on(CLUSTER, recipe, MODEL, NoWork()))
    same = run(recipe)
    assert [*same.replicas] == [0, 1, 2, 3]
    assert all(torch.equal(a.flat(), b) for a, b in zip(plain.replicas, models(same), strict=True))
    assert same.moments == pytest.approx(plain.moments(STEPS), rel=0.02)
    assert (same.changes, same.dropped, same.stood, same.gradients) == ([], 0, 0.0, 4 * STEPS)


BACK = Absence(1, seconds=5.0, begin=Begin(step=9))


@pytest.mark.parametrize("recipe", EQUAL)
def test_a_rank_is_lost_and_comes_back_and_all_end_with_one_model(recipe: str) -> None:
    done = run(recipe, absences=(BACK,))
    assert [*done.replicas] == [0, 1, 2, 3]
    assert all_equal(models(done))
    lost, back = done.changes
    assert (lost.lost, lost.came, lost.present) == ((1,), (), (0, 2, 3))
    assert (back.lost, back.came, back.present) == ((), (1,), (0, 1, 2, 3))
    assert lost.clock <= lost.noticed <= lost.resumed <= back.clock <= back.resumed
    assert lost.dropped == (3 if Recipe.of(recipe).schedule.shape.averages_gradients else 0)
    assert len(done.losses) == len(done.moments) == STEPS
    assert done.moments == sorted(done.moments)
    again = run(recipe, absences=(BACK,))
    assert (again.seconds, again.losses, again.changes) == (done.seconds, done.losses, done.changes)
    assert all(torch.equal(a, b) for a, b in zip(models(again), models(done), strict=True))


@pytest.mark.parametrize("recipe", FLIGHTS)
def test_averages_in_flight_run_again_and_all_anchors_stay_equal(recipe: str) -> None:
    """One rank is lost and comes back, and another is lost meanwhile."""
    gone = (BACK, Absence(3, seconds=3.0, begin=Begin(step=11)))
    done = run(recipe, steps=40, absences=gone)
    assert [*done.replicas] == [0, 1, 2, 3]
    assert {replica.worker.step for replica in done.replicas.values()} == {41}
    assert all_equal(anchors(done))
    assert done.dropped == 0


@pytest.mark.parametrize("at", range(18, 26))
def test_a_fragment_in_flight_at_the_loss_is_averaged_among_those_who_are_there(at: int) -> None:
    """Fragments of 300 numbers travel for steps: some loss is in the midst of one, some before its launch, some after it landed."""
    recipe, late = "allreduce + streaming(8, fragments=2, delay=4)", {"rate": 1500.0, "steps": 32}
    moment = Absence(1, begin=Begin(seconds=at * 0.2))
    done = run(recipe, absences=(moment,), **late)  # type: ignore[arg-type]
    assert [*done.replicas] == [0, 2, 3]
    assert all_equal(anchors(done))
    again = run(recipe, absences=(moment,), **late)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(anchors(again), anchors(done), strict=True))


@pytest.mark.parametrize("at", range(20, 25))
def test_a_fragment_that_is_not_finite_is_dropped_by_all_also_where_members_change(at: int) -> None:
    """A rank's model breaks before a launch. Another rank comes back about when all say who it was."""

    def breaking(model: nn.Module, present: Present, step: int) -> float:
        if present.ranks[present.place] == 2 and step == 12:
            for parameter in model.parameters():
                parameter.detach().fill_(inf)
        return backward(model, present, step)

    recipe, gone = "allreduce + streaming(8, fragments=2, delay=3)", Absence(1, 1.0, begin=Begin(seconds=at * 0.2))
    done = run(recipe, backward=breaking, absences=(gone,), rate=1500.0, steps=32)
    assert [*done.replicas] == [0, 1, 2, 3]
    assert all_equal(anchors(done))
    assert all(flat.isfinite().all() for flat in models(done))
    assert {replica.worker.record.dropped_rounds for replica in done.replicas.values()} & {1, 2}


def test_averages_in_flight_arrive_before_ranks_meet_because_one_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on real ranks, whose comm threads come to their end before they are closed. Each step launches a fragment."""
    launch_again, told = Averaging.launch_again, list[tuple[Any, int]]()

    def watched(self: Any) -> Any:
        told.append((self._worker.in_flight.told(), len(self._worker.in_flight.averages)))
        yield from launch_again(self)

    monkeypatch.setattr(Averaging, "launch_again", watched)
    done = run("qsgd + streaming(2, fragments=2, delay=2)", arrivals=(LaterStart(3, Begin(step=9)),))
    assert [change.came for change in done.changes] == [(3,)]
    assert told == [([], 2)] * 4
    assert all_equal(anchors(done))


def test_a_mean_that_is_delayed_by_a_step_runs_again() -> None:
    done = run("qsgd + delayed()", absences=(BACK,))
    assert [*done.replicas] == [0, 1, 2, 3]
    assert all_equal(models(done))
    assert done.dropped == 0


def test_decoupled_rounds_lose_no_step_and_keep_one_anchor() -> None:
    done = run("decoupled_diloco(4)", absences=(BACK,))
    assert [*done.replicas] == [0, 1, 2, 3]
    assert all_equal(anchors(done))
    assert done.dropped == 0
    assert [change.came for change in done.changes] == [(), (1,)]


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], list[Tensor]]:
    """The models of ranks that have just met, by the lives of all of them."""
    found, meet = defaultdict[tuple[int, ...], list[Tensor]](list), Regrouping.meet

    def watched(self: Any) -> Any:
        yield from meet(self)
        flat = torch.cat([p.detach().reshape(-1).clone() for p in self._steps.model.parameters()])
        found[self._fabric.present.lives].append(flat)

    monkeypatch.setattr(Regrouping, "meet", watched)
    return found


@pytest.mark.parametrize("recipe", ["sgp", "allreduce + gossip(symmetric())"])
def test_gossip_goes_on_from_one_exact_average(recipe: str, met: dict[tuple[int, ...], list[Tensor]]) -> None:
    done = run(recipe, absences=(BACK,))
    assert [*done.replicas] == [0, 1, 2, 3]
    assert [len(each) for each in met.values()] == [3, 4]
    assert all(all_equal(each) for each in met.values())
    assert not all_equal(models(done))
    spread = torch.stack(models(done)).std(0).max()
    assert spread < 0.1 * torch.stack(models(done)).abs().max()


@pytest.mark.parametrize("recipe", ["allreduce", "qsgd", "slowmo(4)", "sgp", "decoupled_diloco(4)"])
def test_members_grow_beyond_the_start_and_shrink(recipe: str) -> None:
    """Two begin, a third and a fourth come, and the first leaves for ever."""
    done = run(
        recipe,
        least=2,
        steps=40,
        absences=(Absence(0, told=True, begin=Begin(step=28)),),
        arrivals=(LaterStart(2, Begin(step=6)), LaterStart(3, Begin(seconds=7.0))),
    )
    assert [each for change in done.changes for each in change.came] == [2, 3]
    assert [each for change in done.changes for each in change.left] == [0]
    assert [*done.replicas] == [1, 2, 3]
    assert len(done.losses) == 40


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(4)"])
def test_who_leaves_with_the_last_step_has_ended(recipe: str) -> None:
    told = tuple(Absence(rank, told=True, begin=Begin(step=8)) for rank in range(2))
    done = run(recipe, size=2, steps=8, absences=told)
    assert [*done.replicas] == [0, 1]
    assert len(done.losses) == 8
    assert done.changes == []


def test_training_begins_when_enough_are_there() -> None:
    done = run("allreduce", least=4, arrivals=(LaterStart(3, Begin(seconds=7.0)),))
    assert done.changes == []
    assert done.moments[0] > 7.0
    with pytest.raises(CostError, match="least must lie from 1 to 4"):
        run("allreduce", least=5)


# -- when it is noticed ------------------------------------------------------------------------------------------------


def test_a_broken_connection_is_noticed_by_whoever_needs_it() -> None:
    """All compute for 0.4 s; the rank is lost 0.1 s after it began, and missed when the first bucket is to be sent."""
    plain = run("allreduce").moments
    lost = run("allreduce", absences=(Absence(1, begin=Begin(seconds=plain[4] + 0.1)),)).changes[0]
    assert lost.clock == pytest.approx(plain[4] + 0.1)
    assert plain[4] + 0.1 < lost.noticed < plain[5]
    assert lost.resumed >= lost.noticed + TIMES.look


def test_what_is_on_its_way_when_a_rank_is_lost_does_not_arrive() -> None:
    """On a slow link a rank is lost while an all-reduce crosses: it fails there and then."""
    slow = {"rate": 2000.0, "steps": 4}
    plain = run("allreduce", **slow).moments  # type: ignore[arg-type]
    at = plain[1] - 0.5 * (plain[1] - plain[0] - 0.4)
    lost = run("allreduce", **slow, absences=(Absence(1, begin=Begin(seconds=at)),)).changes[0]  # type: ignore[arg-type]
    assert lost.noticed == pytest.approx(at + HOSTS.latency)
    assert (lost.dropped, lost.step) == (3, 2)


@pytest.mark.parametrize("recipe", ["allreduce", "slowmo(4)", "sgp", "decoupled_diloco(4)"])
def test_a_machine_that_falls_silent_is_missed_after_a_while(recipe: str) -> None:
    gone = Absence(1, seconds=4.0 * TIMES.silence, silent=True, begin=Begin(seconds=2.0))
    lost = run(recipe, absences=(gone,)).changes[0]
    assert (lost.lost, lost.clock) == ((1,), 2.0)
    assert lost.noticed == pytest.approx(2.0 + TIMES.silence)


def test_a_hand_over_takes_as_long_as_its_bytes() -> None:
    """Model and momentum are 300 numbers each: 2,400 bytes more to sum, on the links of a ring of four."""
    fast, slow = (run("allreduce", absences=(BACK,), rate=rate, steps=40).changes[-1] for rate in (1e6, 1e4))
    assert (fast.came, slow.came) == ((1,), (1,))
    more = (slow.resumed - slow.noticed) - (fast.resumed - fast.noticed)
    assert more > 6 / 4 * 2400 * (1 / 1e4 - 1 / 1e6)


# -- what becomes of state -----------------------------------------------------------------------------------------------


def test_who_comes_back_has_the_momentum_of_the_others() -> None:
    done = run("allreduce", absences=(BACK,))
    held = [
        torch.cat([state["momentum_buffer"].view(-1) for state in replica.optimizer.state.values()])
        for replica in done.replicas.values()
    ]
    assert all_equal(held)
    assert held[0].abs().max() > 0


def test_what_a_lost_rank_still_owed_is_counted() -> None:
    done = run("gather(topk(0.02)) + error_feedback()", absences=(replace(BACK, seconds=inf),))
    assert done.lost_residual > 0
    assert run("gather(topk(0.02)) + error_feedback()").lost_residual == 0


def test_what_the_lost_rank_learned_in_a_round_is_told() -> None:
    done = run("local_sgd(8)", absences=(Absence(1, begin=Begin(step=14)),))
    assert [change.unshared for change in done.changes] == [5]


def test_the_next_to_last_rank_is_lost_and_one_goes_on_alone() -> None:
    gone = tuple(Absence(rank, begin=Begin(step=5 + rank)) for rank in (1, 2, 3))
    for recipe in ("allreduce", "topk", "local_sgd(4)", "sgp", "decoupled_diloco(4)"):
        done = run(recipe, absences=gone)
        assert [*done.replicas] == [0], recipe
        assert len(done.losses) == STEPS


def test_all_are_lost() -> None:
    gone = tuple(Absence(rank, begin=Begin(seconds=3.0)) for rank in range(4))
    with pytest.raises(CostError, match="all ranks are lost and none comes to others at work"):
        run("allreduce", absences=gone)
    with pytest.raises(
        PeerError, match=r"all ranks that held the model are lost, .* restart the run, from a checkpoint"
    ):
        run("allreduce", absences=tuple(replace(each, seconds=60.0) for each in gone))


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 20), marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", MEMBERS)
def test_losses_at_any_moment_leave_the_others_at_work(recipe: str, seeds: range) -> None:
    """Draws of three losses, at moments and not at steps, some of them while ranks meet, and of a rank that comes."""
    for seed in seeds:
        draw = random.Random(f"{recipe} {seed}")
        first = draw.uniform(1.0, 6.0)
        moments = [first, first + draw.uniform(0.0, 1.5), first + draw.uniform(0.0, 6.0)]
        gone = tuple(
            Absence(draw.randrange(1, 5), draw.uniform(0.1, 4.0), silent=draw.random() < 0.3, begin=Begin(seconds=at))
            for at in sorted(moments)
        )
        slow = (SlowSteps(draw.randrange(5), 3.0, 6, Begin(step=draw.randrange(2, 12))),)
        late = (LaterStart(4, Begin(seconds=first + draw.uniform(-1.0, 2.0))),)
        rate = draw.choice([1e6, 3e3])
        done = run(recipe, size=5, absences=gone, slow=slow, arrivals=late, rate=rate)
        assert len(done.losses) == STEPS, (seed, gone)
        if recipe in EQUAL:
            assert all_equal(models(done)), (seed, gone)
        elif recipe in FLIGHTS:
            assert all_equal(anchors(done)), (seed, gone)


def test_a_rank_that_comes_while_another_is_lost_meets_the_others_once() -> None:
    """Decoupled rounds on a slow link: the rank comes at 9.8 s, and another is lost before all have handed over."""
    events = {
        "absences": (
            Absence(3, 1.0, begin=Begin(seconds=11.22)),
            Absence(2, 0.2, silent=True, begin=Begin(seconds=3.96)),
        ),
        "arrivals": (LaterStart(4, Begin(seconds=3.22)), LaterStart(3, Begin(seconds=5.57))),
        "slow": (SlowSteps(0, 3.0, 6, Begin(step=1)),),
    }
    times = MemberTimes(silence=5.0, connecting=0.3)
    done = run("decoupled_diloco(8)", size=5, least=1, times=times, rate=3000.0, **events)
    assert [*done.replicas] == [0, 1, 2, 3, 4]
    assert all_equal(anchors(done))


# -- refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("backup(1)", r"members\(\) with .*cannot go on without a lost rank"),
        ("ad_psgd", r"cannot go on without a lost rank"),
        ("slowmo(4, sharded=True)", r"cannot go on without a lost rank; use .* without sharded"),
        ("gtopk", r"gtopk\(.*cannot go on without a lost rank; use allreduce\(\), gather\(\) or scatter\(\)"),
        ("accordion(epoch=100)", r"counts on the ranks of the start; leave the controller out"),
    ],
)
def test_what_cannot_go_on_is_refused_as_attach_does(recipe: str, why: str) -> None:
    with pytest.raises(GossamerError, match=why):
        run(recipe)


def test_times_that_make_no_sense_are_refused() -> None:
    with pytest.raises(CostError, match="must be 0 seconds or more"):
        MemberTimes(silence=-1.0)
