"""Those who go on agree on the farthest: whoever is behind gets it bit for bit, and where nobody is, nothing travels."""

import torch
from torch import nn

from gossamer.fabrics.links import Network
from gossamer.fabrics.sim import simulate
from gossamer.schedules.handing_over import HandingOver
from gossamer.schedules.recovery import FurthestProgress, agree
from gossamer.simulate import Replica, replicas


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def learners(inputs: int = 5) -> list[Replica]:
    ranks = replicas("decoupled_diloco(4)", lambda: nn.Linear(inputs, 3), sgd, 3)
    for replica in ranks:
        loop = replica.worker.loop
        for state, x in zip(loop.states, loop.parameters(), strict=True):
            state["anchor"] = x
    return ranks


def agreed(ranks: list[Replica], rounds: list[int]) -> list[FurthestProgress]:
    programs = [
        agree([r.worker.loop], n, 10 + i, (0, i), HandingOver(r.worker.loop).says())
        for i, (r, n) in enumerate(zip(ranks, rounds, strict=True))
    ]
    return simulate(programs).results


def test_who_is_behind_gets_what_the_first_of_those_ahead_holds() -> None:
    ranks, generator = learners(), torch.Generator().manual_seed(3)
    for state in ranks[1].worker.loop.states:
        state["anchor"] = torch.randn(state["anchor"].shape, generator=generator)
        state["velocity"] = torch.full_like(state["anchor"], -0.0)
    there = [dict(state) for state in ranks[1].worker.loop.states]
    behind, *ahead = agreed(ranks, [3, 4, 4])
    assert [latest.states for latest in ahead] == [[], []]
    for latest in (behind, *ahead):
        assert latest[:3] == (4, 11, (0, 1))
    for given, held in zip(behind.states, there, strict=True):
        for key in ("anchor", "velocity"):
            assert torch.equal(given[key].view(torch.int32), held[key].view(torch.int32))


def test_who_is_behind_gets_the_arrivals_that_the_velocity_waits_for() -> None:
    ranks = learners()
    for state in ranks[2].worker.loop.states:
        state["arrived"], state["arrivals"] = torch.full_like(state["anchor"], 0.5), torch.tensor(2.0)
    for latest in agreed(ranks, [3, 3, 4])[:2]:
        assert all(torch.equal(s["arrived"], torch.full_like(s["anchor"], 0.5)) for s in latest.states)
        assert [int(s["arrivals"]) for s in latest.states] == [2]


def test_only_who_is_behind_waits_for_the_state() -> None:
    ranks = learners(10_000)
    for state in ranks[1].worker.loop.states:
        state["velocity"] = torch.zeros_like(state["anchor"])
    programs = [
        agree([r.worker.loop], n, 10, (0,), HandingOver(r.worker.loop).says()) for r, n in zip(ranks, [0, 4, 4])
    ]
    state_bytes = 2 * 4 * ranks[0].flat().numel()
    comes, *others = simulate(programs, Network(rate=state_bytes / 100)).clocks
    assert comes > 100.0
    assert max(others) < 5.0


def test_where_nobody_is_behind_nothing_travels() -> None:
    ranks = learners()
    assert [latest.states for latest in agreed(ranks, [4, 4, 4])] == [[], [], []]
