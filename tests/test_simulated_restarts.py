"""Simulated runs whose ranks are lost, leave or come, and start again from checkpoints."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import pytest
import torch
from torch import nn

from gossamer.core.errors import CostError
from gossamer.costs import Cluster, Hosts
from gossamer.costs.events import Absence, Begin, Events, LaterStart, SlowSteps
from gossamer.planning.model_cost import ModelCost, guessed_shares
from gossamer.planning.work import NoWork
from gossamer.simulate import costs_on, replicas
from gossamer.simulate import train as train_undisturbed
from gossamer.simulated_restarts import Crew, RestartedRun, Restarts, train

SHAPES = {"0.weight": (20, 10), "1.weight": (5, 20)}
HOSTS = Hosts(count=4, up=1e6, latency=1e-3)
CLUSTER = Cluster(hosts=(HOSTS,), payload=1.0, efficiency={"ring": 1.0}, byte_seconds=0.0, program_seconds=0.0)
MODEL = ModelCost(shapes=SHAPES, forward=0.1, backward=0.3, optimizer=0.0, shares=guessed_shares(SHAPES))
STEPS, RESTARTS = 24, Restarts(every=8, saving=0.25, seconds=5.0)
RECIPES = ("allreduce", "topk", "local_sgd(4)", "sgp", "osgp", "overlap_local_sgd(4)", "decoupled_diloco(4)")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 20, bias=False), nn.Linear(20, 5, bias=False))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def pull(model: nn.Module, rank: int, step: int) -> float:
    x = torch.randn(4, 10, generator=torch.Generator().manual_seed(100 * step + rank))
    loss = model(x).square().mean()
    loss.backward()
    return loss.item()


def crews(recipe: str) -> Callable[[Sequence[int]], Crew]:
    def crew(present: Sequence[int]) -> Crew:
        costs = costs_on(CLUSTER.of_nodes(present), recipe, MODEL, NoWork())
        return Crew(replicas(recipe, net, sgd, len(present)), pull, costs)

    return crew


def run(recipe: str, restarts: Restarts = RESTARTS, **events: tuple[object, ...]) -> RestartedRun:
    return train(crews(recipe), 4, STEPS, Events(**events), restarts)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_rank_that_is_lost_and_comes_back_changes_nothing_but_the_time(recipe: str) -> None:
    fleet = replicas(recipe, net, sgd, 4)
    plain = train_undisturbed(fleet, pull, STEPS, costs_on(CLUSTER, recipe, MODEL, NoWork()))
    lost = run(recipe, absences=(Absence(1, seconds=2.0, begin=Begin(step=12)),))
    assert all(torch.equal(a.flat(), b.flat()) for a, b in zip(plain.replicas, lost.replicas, strict=True))
    assert lost.losses == [sum(each) / 4 for each in zip(*(r.losses for r in fleet), strict=True)]
    (restart,) = lost.restarts
    assert (restart.done, restart.again, restart.present) == (8, 3, (0, 1, 2, 3))
    assert restart.resumed == restart.clock + 5.0
    redone = restart.clock - lost.moments[7] - RESTARTS.saving
    assert lost.seconds == pytest.approx(plain.seconds + 2 * RESTARTS.saving + redone + 5.0)


def test_without_events_only_saving_takes_time() -> None:
    plain = train_undisturbed(replicas("qsgd", net, sgd, 4), pull, STEPS, costs_on(CLUSTER, "qsgd", MODEL, NoWork()))
    saved = run("qsgd")
    assert saved.restarts == []
    assert saved.seconds == pytest.approx(plain.seconds + 2 * RESTARTS.saving)
    assert len(saved.moments) == STEPS == len(saved.losses)


@pytest.mark.parametrize("recipe", RECIPES)
def test_who_does_not_come_back_is_missed_in_the_average(recipe: str) -> None:
    lost = run(recipe, absences=(Absence(1, begin=Begin(step=12)),))
    assert [r.present for r in lost.restarts] == [(0, 2, 3)]
    assert len(lost.replicas) == 3
    assert len(lost.losses) == STEPS


def test_who_says_so_loses_no_step() -> None:
    told = run("allreduce", absences=(Absence(1, told=True, begin=Begin(step=11)),))
    (restart,) = told.restarts
    assert (restart.done, restart.again, restart.present) == (11, 0, (0, 2, 3))
    assert restart.clock == pytest.approx(told.moments[10] + RESTARTS.saving)


def test_a_notice_within_a_round_ends_the_round() -> None:
    told = run("local_sgd(4)", absences=(Absence(1, told=True, begin=Begin(step=10)),))
    assert [(r.done, r.again) for r in told.restarts] == [(12, 0)]


def test_a_notice_while_a_checkpoint_is_written_is_heard() -> None:
    ends = run("allreduce").moments[7]
    told = run("allreduce", absences=(Absence(1, told=True, begin=Begin(seconds=ends + 0.1)),))
    assert [(r.done, r.again, r.present) for r in told.restarts] == [(8, 0, (0, 2, 3))]


def test_who_comes_later_is_there_from_then_on() -> None:
    grown = run("allreduce", arrivals=(LaterStart(3, Begin(step=11)),))
    assert [(r.done, r.again, r.present) for r in grown.restarts] == [(8, 2, (0, 1, 2, 3))]
    assert len(grown.replicas) == 4


def test_a_loss_while_a_checkpoint_is_written_loses_the_checkpoint() -> None:
    ends = run("allreduce").moments[7]
    lost = run("allreduce", absences=(Absence(1, seconds=1.0, begin=Begin(seconds=ends + 0.1)),))
    assert [(r.done, r.again) for r in lost.restarts] == [(0, 8)]


def test_all_are_lost_and_some_come_back() -> None:
    gone = tuple(Absence(rank, seconds=60.0 + rank, begin=Begin(seconds=1.0)) for rank in range(4))
    late = run("allreduce", absences=gone)
    assert late.restarts[0].present == ()
    assert late.seconds > 61.0
    with pytest.raises(CostError, match="all ranks are lost and none comes back"):
        run("allreduce", absences=tuple(replace(each, seconds=inf) for each in gone))


def test_slow_steps_are_those_of_the_rank_and_not_of_its_place() -> None:
    """Rank 3 is slow in 6 steps from step 14 on; by then rank 1 is gone, and rank 3 is the third of those that are left."""
    gone = Absence(1, told=True, begin=Begin(step=8))
    plain = run("allreduce", absences=(gone,))
    slow = run("allreduce", absences=(gone,), slow=(SlowSteps(3, 4.0, 6, Begin(step=14)),))
    assert slow.seconds == pytest.approx(plain.seconds + 6 * 3 * MODEL.computing)


@pytest.mark.parametrize("recipe", ["backup", "allreduce + by_speed(local_sgd(4))"])
def test_a_rank_that_is_late_and_leaves_steps_out_starts_again_with_the_others(recipe: str) -> None:
    slow = SlowSteps(2, 6.0, STEPS, Begin(step=1))
    lost = run(recipe, slow=(slow,), absences=(Absence(1, seconds=2.0, begin=Begin(step=12)),))
    assert len(lost.restarts) == 1
    assert len(lost.losses) == len(lost.moments) == STEPS
    assert lost.moments == sorted(lost.moments)
    assert lost.gradients < 4 * STEPS


def test_a_run_repeats_exactly() -> None:
    events = (Absence(1, seconds=7.0, begin=Begin(seconds=3.0)), Absence(2, begin=Begin(step=20)))
    first, second = run("qsgd", absences=events), run("qsgd", absences=events)
    assert (first.seconds, first.losses, first.restarts) == (second.seconds, second.losses, second.restarts)


def test_a_plain_run_refuses_events_that_it_would_pass_over() -> None:
    costs = costs_on(CLUSTER, "qsgd", MODEL, NoWork(), Events(absences=(Absence(1, begin=Begin(step=3)),)))
    with pytest.raises(CostError, match=r"give the events to gossamer\.simulated_restarts\.train"):
        train_undisturbed(replicas("qsgd", net, sgd, 4), pull, 4, costs)


@pytest.mark.parametrize("wrong", [{"every": 0}, {"every": 5, "saving": -1.0}, {"every": 5, "seconds": inf}])
def test_restarts_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(CostError, match="must be"):
        Restarts(**wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("step", [1, 9])
@pytest.mark.parametrize("saving", [0.0, 0.25])
def test_who_goes_at_the_first_step_after_a_start_or_a_checkpoint_is_gone(step: int, told: bool, saving: float) -> None:
    restarts = Restarts(every=8, saving=saving, seconds=5.0)
    gone = run("allreduce", restarts, absences=(Absence(1, told=told, begin=Begin(step=step)),))
    (restart,) = gone.restarts
    assert (restart.done, restart.again, restart.present) == (step - 1 + told, 0, (0, 2, 3))
    assert (len(gone.losses), len(gone.replicas)) == (STEPS, 3)


def test_a_loss_at_the_very_moment_of_a_restart_is_one_restart() -> None:
    now = Restarts(every=8, saving=0.0, seconds=0.0)
    lost = run("allreduce", now, absences=(Absence(1, begin=Begin(step=12)), Absence(2, begin=Begin(step=12))))
    assert [restart.present for restart in lost.restarts] in ([(0, 3)], [(0, 2, 3), (0, 3)])
    assert len(lost.losses) == STEPS


def test_all_who_go_at_once_are_an_error() -> None:
    away = tuple(Absence(rank, told=True, begin=Begin(step=1)) for rank in range(4))
    with pytest.raises(CostError, match="all ranks are lost and none comes back"):
        run("allreduce", absences=away)
