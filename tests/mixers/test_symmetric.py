"""Symmetric and compressed gossip: D-PSGD and CHOCO-SGD against what the papers write down."""

import pytest
import torch
from tests.mixers.story import NUMEL, disagreeing, quadratics, scattered, spread, still, targets
from tests.runtime.gym import Flat, Odd, Replica, bit_equal, held, land, make, on_all, parameters, sgd, train
from torch import Tensor

from gossamer.core.errors import AttachError, RecipeError
from gossamer.fabrics.sim import Network
from gossamer.recipe import Recipe

GRAPHS = [
    "two_way(ring())",
    "bipartite()",
    "complete()",
    "two_way(exponential())",
    "graph('0-1 0-2 0-3 0-4 4-5 5-6 5-7')",
]


def circle(size: int) -> Tensor:
    """(1/3, 1/3, 1/3) on a ring."""
    eye = torch.eye(size, dtype=torch.float64)
    return (eye + eye.roll(1, 0) + eye.roll(-1, 0)) / 3


def test_d_psgd_takes_the_gradient_before_it_mixes() -> None:
    """x <- W x - lr g(x): what the paper has, with any delay of the messages."""
    ranks = make("d_psgd", 8, lambda: Flat(NUMEL), sgd(0.1, 0.0))
    x, best, mixing = torch.stack(parameters(ranks)), quadratics(8), torch.eye(8, dtype=torch.float64)
    for _ in range(14):
        train(ranks, targets, 1, Network(latency=0.4), lambda rank, step: 1.0)
        x, mixing = mixing @ x - 0.1 * (x - best), circle(8)
        torch.testing.assert_close(torch.stack(parameters(ranks)), x, rtol=0, atol=1e-13)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("schedule", ["", ", overlap=True", ", every=2, overlap=True"])
def test_the_mean_follows_gradient_descent_on_the_mean(graph: str, schedule: str) -> None:
    ranks = make(f"allreduce + gossip(symmetric({graph}){schedule})", 8, lambda: Flat(NUMEL), sgd(0.1, 0.0))
    mean, best = parameters(ranks)[0], quadratics(8).mean(0)
    for _ in range(12):
        train(ranks, targets, 1)
        mean = mean - 0.1 * (mean - best)
        torch.testing.assert_close(torch.stack(parameters(ranks)).mean(0), mean, rtol=0, atol=1e-14)
    assert 0 < spread(parameters(ranks)) < spread(list(quadratics(8)))


def test_two_halves_are_bit_equal_at_both_ends() -> None:
    ranks = disagreeing("d_psgd(topology=bipartite(), overlap=False)", 8)
    train(ranks, still, 1)
    assert all(bit_equal(parameters(ranks[i : i + 2])) for i in (0, 2, 4, 6))
    train(ranks, still, 2)
    assert spread(parameters(ranks)) < 1e-15


@pytest.mark.parametrize("overlap", [False, True])
def test_delays_change_no_bit(overlap: bool) -> None:
    recipe = f"d_psgd(overlap={overlap})"
    slow, fast = disagreeing(recipe, 5, lr=0.1), disagreeing(recipe, 5, lr=0.1)
    train(slow, targets, 9, Network(latency=0.7, rate=(1e3, 1e2, 1e4, 1e3, 2e2)), lambda rank, step: 1.0 + rank)
    train(fast, targets, 9)
    assert all(bit_equal(pair) for pair in zip(parameters(slow), parameters(fast), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", ["d_psgd", "d_psgd(overlap=False)", "choco_sgd(gamma=0.5)"])
def test_models_in_half_precision_lose_no_mass(recipe: str, dtype: torch.dtype) -> None:
    ranks = make(recipe, 5, lambda: Flat(NUMEL, dtype), sgd(0.0, 0.0))
    for r, start in zip(ranks, scattered(5)):
        r.model.get_parameter("x").data.copy_(start)
    before = mass(ranks)
    train(ranks, still, 60)
    torch.testing.assert_close(mass(ranks), before, rtol=1e-4, atol=3e-5)


def mass(ranks: list[Replica]) -> Tensor:
    on_all(ranks, land)
    return sum((held(r).double() for r in ranks), torch.zeros(()).double())


def test_choco_with_an_exact_codec_is_symmetric_gossip() -> None:
    chocos = make("choco_sgd(codec=fp32(), gamma=1.0)", 5, lambda: Flat(NUMEL), sgd(0.1, 0.9))
    ranks = make("d_psgd(overlap=False)", 5, lambda: Flat(NUMEL), sgd(0.1, 0.9))
    for _ in range(8):
        train(chocos, targets, 1)
        train(ranks, targets, 1)
        torch.testing.assert_close(torch.stack(parameters(chocos)), torch.stack(parameters(ranks)), rtol=0, atol=1e-6)


def by_the_paper(steps: int, ratio: float, gamma: float) -> Tensor:
    """CHOCO-SGD on a ring of 6 with top-k, written down as the paper has it; beliefs begin at the models of the first round."""
    x, best, w = Flat(NUMEL).x.detach().expand(6, -1), quadratics(6), circle(6)
    kept = int(torch.ceil(torch.tensor(ratio * NUMEL)))
    y = torch.zeros_like(x)
    for step in range(steps):
        x = x - 0.1 * (x - best)
        q = x - y
        if step:
            places = q.abs().topk(kept, dim=1).indices
            q = torch.zeros_like(q).scatter(1, places, q.gather(1, places).float().double())
        y = y + q
        x = x + gamma * (w @ y - y)
    return x


def test_choco_follows_the_paper_step_by_step() -> None:
    ranks = make("choco_sgd(codec=topk(ratio=0.3), gamma=0.3)", 6, lambda: Flat(NUMEL), sgd(0.1, 0.0))
    for step in range(1, 10):
        train(ranks, targets, 1)
        torch.testing.assert_close(torch.stack(parameters(ranks)), by_the_paper(step, 0.3, 0.3), rtol=0, atol=1e-6)


@pytest.mark.parametrize("codec", ["topk(ratio=0.2)", "qsgd()", "bf16()", "ternary(clip=0.0)"])
def test_choco_loses_none_of_the_sum_and_comes_together(codec: str) -> None:
    ranks = disagreeing(f"choco_sgd(codec={codec})", 8)
    start = torch.stack(parameters(ranks))
    train(ranks, still, 60)
    end = torch.stack(parameters(ranks))
    torch.testing.assert_close(end.mean(0), start.mean(0), rtol=0, atol=1e-6)
    assert spread(list(end)) < 0.2 * spread(list(start))


def test_choco_sends_models_once_and_then_what_the_codec_writes() -> None:
    ranks = make("choco_sgd(codec=topk(ratio=0.5))", 4)
    sent = [train(ranks, still, 1).ledger.sent for _ in range(3)]
    numbers = sum(p.numel() for p in Odd().parameters())
    assert sent[0] == 4 * 2 * 4 * numbers
    assert sent[1] == sent[2] < 1.2 * sent[0]


ONE_WAY_FIRST = "switch(graph('0>1 1>2 2>0 0>2'), 2, complete())"
UNEVEN_FIRST = "switch(graph('0>1:.3 1>0:.4 1-2:.3'), 2, graph('0-1:.3 1-2:.3'))"


def refused(recipe: str, size: int) -> str:
    with pytest.raises((RecipeError, AttachError)) as caught:
        make(Recipe.of(recipe), size)
    return str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "size", "words"),
    [
        ("d_psgd(topology=ring())", 4, "use two_way(ring()), or push_sum(ring())"),
        ("d_psgd(topology=exponential())", 5, "needs an undirected graph"),
        ("d_psgd(topology=bipartite())", 5, "one would have no partner"),
        ("allreduce + gossip(symmetric(graph('0-1 0-2'), weights='given'))", 3, "are not doubly stochastic"),
        (f"allreduce + gossip(symmetric({ONE_WAY_FIRST}))", 3, "has edges in one direction only"),
        (f"allreduce + gossip(symmetric({UNEVEN_FIRST}, weights='given'))", 3, "are not doubly stochastic"),
        ("allreduce + gossip(symmetric(graph('0-1')))", 3, "is of 2 ranks, and this world has 3"),
        ("choco_sgd(topology=two_way(exponential()))", 8, "use a topology that does not change"),
        ("choco_sgd(topology=ring())", 3, "needs an undirected graph"),
        ("choco_sgd(gamma=1.5)", 3, "gamma must lie in (0, 1], got 1.5"),
        ("choco_sgd(gamma=0.0)", 3, "gamma must lie in (0, 1], got 0.0"),
        ("choco_sgd(codec=powersgd())", 3, "can only decode sums of messages"),
        ("choco_sgd(codec=topk(scope='global'))", 3, "gossip uses several; use topk()"),
        ("choco_sgd(codec=topk(index='rice'))", 3, "depends on the data"),
        ("choco_sgd(codec=ternary(deviation='centred'))", 3, "no gamma is safe"),
        ("choco_sgd + error_feedback()", 3, "the error does not vanish"),
    ],
)
def test_what_would_never_agree_is_refused(recipe: str, size: int, words: str) -> None:
    assert words in refused(recipe, size)


def test_a_graph_that_changes_for_good_mixes_symmetrically_before_and_after() -> None:
    """Where all agree they go on to: a graph with one-way edges would weigh some of them twice."""
    ranks = make(f"allreduce + gossip(symmetric(two_way({ONE_WAY_FIRST})))", 3)
    start = parameters(ranks)
    for _ in range(4):
        train(ranks, still, 1)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(parameters(ranks), start))


@pytest.mark.parametrize(
    "recipe", ["d_psgd", "choco_sgd", "gossip_pga", "sgp(topology=graph('0-1'))", "d_psgd(topology=bipartite())"]
)
def test_two_ranks_and_one_train(recipe: str) -> None:
    for size in (1, 2):
        ranks = make(recipe, size, lambda: Flat(NUMEL), sgd(0.1, 0.0))
        train(ranks, targets, 40)
        on_all(ranks, land)
        best = quadratics(size).mean(0)
        torch.testing.assert_close(torch.stack(parameters(ranks)).mean(0), best, rtol=0, atol=0.04)
