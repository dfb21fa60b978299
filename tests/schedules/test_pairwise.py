"""AD-PSGD on the simulator: pairs that meet whenever they like, whose sum nothing but optimizers move."""

from collections.abc import Callable

import pytest
import torch
from tests.mixers.story import NUMEL, disagreeing, still, targets
from tests.runtime.gym import (
    Flat,
    bit_equal,
    held,
    make,
    on_all,
    parameters,
    pull,
    remembered,
    resumed,
    saved,
    sgd,
    train,
)
from torch import Tensor, nn

from gossamer.core.errors import AttachError, RecipeError
from gossamer.core.rng import CounterRng
from gossamer.core.topology import sides
from gossamer.fabrics.sim import Network
from gossamer.planning import bytes_between, bytes_per_step
from gossamer.recipe import Recipe
from gossamer.runtime import Worker
from gossamer.schedules import Pairwise
from gossamer.simulate import Replica, replicas
from gossamer.topologies import Bipartite, Complete, Graph, Ring, TwoWay

SLOW = Network(latency=0.3, rate=(1e3, 2e2, 4e3, 1e3))
GRAPHS = [("bipartite()", 4), ("two_way(ring())", 4), ("graph('0-1 0-2 0-3')", 4), ("graph('0-1 0-2')", 3)]


def models(ranks: list[Replica]) -> Tensor:
    """What each rank holds, with what it is owed, when all pairs have met."""
    on_all(ranks, Worker.quiesce)
    return torch.stack([held(r) for r in ranks])


def uneven(rank: int, step: int) -> float:
    return 1.0 + rank + 0.37 * (step % 3)


@pytest.mark.parametrize(("graph", "size"), GRAPHS)
@pytest.mark.parametrize("partners", ["random", "in turn"])
def test_the_sum_of_models_is_kept_by_every_meeting_and_models_come_together(
    graph: str, size: int, partners: str
) -> None:
    """Nothing but meetings: whatever is on its way, however late. An odd number of ranks too, where a graph has two sides."""
    ranks = disagreeing(f"allreduce + pairwise({graph}, partners={partners!r})", size)
    start = torch.stack(parameters(ranks))
    for steps in (1, 2, 4, 40):
        train(ranks, still, steps, SLOW, uneven)
        torch.testing.assert_close(models(ranks).mean(0), start.mean(0), rtol=0, atol=1e-14)
    assert float((models(ranks) - start.mean(0)).abs().max()) < 1e-2 * float((start - start.mean(0)).abs().max())


def known_gradients(model: nn.Module, rank: int, step: int) -> float:
    for p in model.parameters():
        p.grad = torch.linspace(-1.0, 1.0, p.numel(), dtype=p.dtype).view(p.shape) * (rank + step)
    return 0.0


def test_no_step_is_lost_that_was_made_while_models_travelled() -> None:
    """The sum moves by what the optimizers did, and by nothing else, though answers are many steps late."""
    ranks = make("ad_psgd", 4, lambda: Flat(NUMEL), sgd(0.1, momentum=0.0))
    start, steps = torch.stack(parameters(ranks)).sum(0), 15
    train(ranks, known_gradients, steps, Network(latency=7.0), uneven)
    given = sum(rank + step for rank in range(4) for step in range(1, steps + 1))
    expected = start - 0.1 * given * torch.linspace(-1.0, 1.0, NUMEL, dtype=torch.float64)
    torch.testing.assert_close(models(ranks).sum(0), expected, rtol=0, atol=1e-12)


def test_a_meeting_is_doubly_stochastic_in_expectation() -> None:
    """All partners are as likely as the topology has them: 4000 draws, five standard deviations."""
    schedule, size = Pairwise(TwoWay(Ring())), 6
    loop = make(Recipe.of(f"allreduce + {schedule}"), size)[0].worker.loop
    met = torch.zeros(size, dtype=torch.float64)
    for step in range(1, 4001):
        context = loop.ranks.context(step)._replace(rng=CounterRng(7, step, 0))
        met[schedule._partner(context)] += 1
    assert met.nonzero().flatten().tolist() == [1, 5]
    assert abs(float(met[1]) - 2000) < 5 * 1000**0.5


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_where_nobody_is_slow_it_is_d_psgd(momentum: float) -> None:
    """Pairs in turn, and who answers is a hair ahead: the very models, step by step."""
    both = [
        make(recipe, 4, lambda: Flat(NUMEL), sgd(0.1, momentum))
        for recipe in ("allreduce + pairwise(partners='in turn')", "d_psgd(topology=bipartite())")
    ]
    for ranks in both:
        train(ranks, targets, 12, seconds=lambda rank, step: 1.0 if rank % 2 else 1.001)
    torch.testing.assert_close(torch.stack(parameters(both[0])), torch.stack(parameters(both[1])), rtol=0, atol=1e-13)
    assert not bit_equal(parameters(both[0]))


@pytest.mark.parametrize("slow", [0, 1])
def test_one_slow_rank_holds_up_nobody_but_itself(slow: int) -> None:
    """Whether it asks or answers; the others go on learning with one another meanwhile."""
    ranks = make("ad_psgd", 4)
    train(ranks, pull, 30, Network(latency=0.01), lambda rank, step: 8.0 if rank == slow else 1.0)
    assert [r.clock for r in ranks] == pytest.approx([240.0 if rank == slow else 30.0 for rank in range(4)])
    assert all(r.losses[-1] < 0.5 * r.losses[0] for r in ranks)
    waiting = make("d_psgd(topology=bipartite())", 4)
    train(waiting, pull, 30, Network(latency=0.01), lambda rank, step: 8.0 if rank == slow else 1.0)
    assert min(r.clock for r in waiting) > 200


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_three_ranks_hold_each_other_up_as_little(slow: int) -> None:
    ranks = make("ad_psgd(topology=graph('0-1 0-2'))", 3)
    train(ranks, pull, 30, Network(latency=0.01), lambda rank, step: 8.0 if rank == slow else 1.0)
    assert [r.clock for r in ranks] == pytest.approx([240.0 if rank == slow else 30.0 for rank in range(3)])
    assert all(r.losses[-1] < 0.5 * r.losses[0] for r in ranks)


def test_how_old_an_answer_was_is_noted() -> None:
    """At a latency of L a question and its answer take 2 L; rank 1 computes for a second, and answers meanwhile."""
    for latency, age in (0.0, 1), (0.7, 2), (1.2, 3):
        ranks = make("ad_psgd", 2)
        run = train(ranks, pull, 13, Network(latency), lambda rank, step: 1.0)
        assert set(ranks[0].worker.record.ages) == {age}
        assert {(a.rank, a.age) for a in run.ledger.ages} == {(0, age)}
        assert [a.step for a in run.ledger.ages] == [*range(1 + age, 14, age)]
        assert not ranks[1].worker.record.ages  # it answers, and its model is that of its last step


@pytest.mark.parametrize("late", [0.0, 0.25])
def test_a_run_that_is_killed_and_resumed_after_any_step_changes_no_bit(late: float) -> None:
    """With what is on its way, and what is owed; ranks at one step, as `save` wants them."""

    def go(ranks: list[Replica]) -> None:
        train(ranks, pull, 1, Network(latency=late), lambda rank, step: 1.0 + rank / 8)

    ranks = make("ad_psgd + bucket(0.00002)", 4)
    for step in range(1, 7):
        go(ranks)
        again = resumed("ad_psgd + bucket(0.00002)", saved(ranks))
        for kept, fresh in zip(ranks, again, strict=True):
            a, b = (remembered(r.worker, "mixer") for r in (kept, fresh))
            assert a.keys() == b.keys(), step
            assert all(bit_equal([a[k], b[k]]) for k in a), step
        twins = resumed("ad_psgd + bucket(0.00002)", saved(ranks))
        for crew in (again, twins, ranks):
            go(crew)
        assert all(bit_equal(three) for three in zip(*map(parameters, (ranks, again, twins)), strict=True)), step


def test_the_same_run_twice_is_the_same_to_the_bit() -> None:
    both = [make("ad_psgd", 4) for _ in range(2)]
    for ranks in both:
        train(ranks, pull, 12, SLOW, uneven)
    assert all(bit_equal(pair) for pair in zip(*map(parameters, both), strict=True))


def test_half_precision_loses_nothing_of_the_sum() -> None:
    def half() -> nn.Module:
        return Flat(NUMEL, torch.bfloat16, start=1.0)

    ranks = make("ad_psgd", 4, half, sgd(0.1, momentum=0.0))
    rng = torch.Generator().manual_seed(3)
    for r in ranks:
        r.model.get_parameter("x").data.copy_(torch.randn(NUMEL, generator=rng))
    start = torch.stack(parameters(ranks)).float().mean(0)
    train(ranks, still, 40, Network(latency=0.1), uneven)
    torch.testing.assert_close(models(ranks).mean(0), start, rtol=0, atol=1e-6)


def test_bytes_are_those_that_travel() -> None:
    """Per rank, half of what a pair says: a question of 4 d + 8 bytes and an answer of 4 d for every step of who asks."""
    shapes = {"w": (1000,), "b": (24,)}
    ranks = replicas("ad_psgd", lambda: nn.Linear(1000, 1), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), 4)
    run = train(ranks, still, 10, seconds=lambda rank, step: 1.0)
    assert run.ledger.sent == 10 * 2 * (2 * 4 * 1001 + 8)
    assert bytes_per_step("ad_psgd", shapes, 4) == 4 * 1024 + 4
    assert bytes_per_step("ad_psgd(every=4)", shapes, 4) == (4 * 1024 + 4) / 4
    assert bytes_between("ad_psgd(topology=graph('0-1'))", shapes, 2, per_node=2) == 0


REFUSED: list[tuple[str, int, type[Exception], str]] = [
    (
        "ad_psgd",
        3,
        AttachError,
        r"of 3 ranks one would have no partner; use an even number of ranks.* graph\('0-1 0-2'\)",
    ),
    ("ad_psgd(topology=two_way(ring()))", 5, AttachError, "not bipartite: ranks .* use bipartite"),
    ("ad_psgd(topology=complete())", 4, AttachError, "not bipartite"),
    (
        "ad_psgd(topology=ring())",
        4,
        AttachError,
        r"needs an undirected graph.*use two_way\(ring\(\)\), or bipartite\(\)$",
    ),
    ("ad_psgd(topology=switch(graph('0-1 1-2 2-0'), 4, graph('0-1 1-2')))", 3, AttachError, "not bipartite"),
    ("ad_psgd(topology=switch(bipartite(), 1, graph('0-2 2-1 1-3 3-0')))", 4, AttachError, "not bipartite"),
    ("ad_psgd(topology=graph('0-1 2-3'))", 4, RecipeError, "not connected"),
    ("qsgd + pairwise()", 4, RecipeError, "would send nothing.*use 'allreduce"),
    ("topk + pairwise()", 4, RecipeError, "drop the memory, or compress"),
    ("allreduce + pairwise(every=0)", 4, RecipeError, "every must be at least 1"),
    ("allreduce + pairwise() + rule('ndim < 2', allreduce(bf16()))", 4, RecipeError, "whole models are averaged"),
]


@pytest.mark.parametrize(("recipe", "size", "error", "message"), REFUSED, ids=[r[0] for r in REFUSED])
def test_what_cannot_be_is_refused_with_the_reason_and_the_fix(
    recipe: str, size: int, error: type[Exception], message: str
) -> None:
    with pytest.raises((AttachError, RecipeError), match=message) as raised:
        make(recipe, size)
    assert isinstance(raised.value, error)


@pytest.mark.parametrize("make_topology", [Bipartite, lambda: TwoWay(Ring()), lambda: Graph("0-1 1-2 2-3")])
def test_sides_part_every_edge(make_topology: Callable[[], Bipartite]) -> None:
    first, second = sides(make_topology(), 4)
    assert 0 in first
    assert first | second == set(range(4))
    for rank in first:
        assert not set(make_topology().peers(rank, 4, 0).to) & first


def test_a_circle_of_odd_length_has_no_sides() -> None:
    with pytest.raises(AttachError, match="not bipartite"):
        sides(Complete(), 3)


def test_one_rank_trains_plainly_and_two_are_one_pair() -> None:
    alone, plain = make("ad_psgd", 1), make("allreduce", 1)
    for ranks in (alone, plain):
        train(ranks, pull, 5)
    assert bit_equal([alone[0].flat(), plain[0].flat()])
    pair = disagreeing("ad_psgd", 2)
    start = torch.stack(parameters(pair)).mean(0)
    train(pair, still, 4, seconds=lambda rank, step: 1.0)
    assert all(torch.allclose(model, start, atol=1e-14) for model in parameters(pair))
