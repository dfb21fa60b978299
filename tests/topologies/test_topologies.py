"""Topologies: pure arithmetic about who sends to whom."""

import math

import pytest
import torch
from torch import Tensor

from gossamer.core.contracts import Topology
from gossamer.core.errors import RecipeError
from gossamer.core.parts import registry
from gossamer.topologies import Complete, Exponential, Ring

ALL = [*(made() for made in registry.of("topology").values()), *(Exponential(p) for p in (2, 3, 4, 7))]
ROUNDS = range(7)


def matrix(topology: Topology, size: int, round: int) -> Tensor:
    """P[j, i] is the share of its mass that i sends to j."""
    p = torch.zeros(size, size, dtype=torch.float64)
    for i in range(size):
        peers = topology.peers(i, size, round)
        p[i, i] = 1 - peers.share * len(peers.to)
        for j in peers.to:
            p[j, i] += peers.share
    return p


def hops(count: int, size: int, round: int) -> set[int]:
    return set(Exponential(count).peers(0, size, round).to)


@pytest.mark.parametrize("topology", ALL, ids=repr)
def test_every_sender_has_its_receiver_and_nobody_meets_itself(topology: Topology) -> None:
    for size in range(1, 41):
        for round in ROUNDS:
            peers = [topology.peers(rank, size, round) for rank in range(size)]
            for i, (to, source, share) in enumerate(peers):
                assert i not in to
                assert i not in source
                assert len(set(to)) == len(to)
                assert len(set(source)) == len(source)
                assert all(0 <= j < size for j in (*to, *source))
                assert all(i in peers[j].source for j in to)
                assert all(i in peers[j].to for j in source)
                assert share * len(to) < 1
                assert (share > 0) == (size > 1)
                assert bool(to) == (size > 1)


@pytest.mark.parametrize("topology", ALL, ids=repr)
def test_mass_is_conserved_and_regular_graphs_are_doubly_stochastic(topology: Topology) -> None:
    for size in range(1, 25):
        p = matrix(topology, size, 3)
        torch.testing.assert_close(p.sum(0), torch.ones(size, dtype=torch.float64))
        torch.testing.assert_close(p.sum(1), torch.ones(size, dtype=torch.float64))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 9, 16, 31, 32, 33])
def test_one_peer_hops_are_the_powers_of_two_below_the_size(size: int) -> None:
    period = (size - 1).bit_length()
    assert [hops(1, size, k) for k in range(2 * period)] == [{2 ** (k % period)} for k in range(2 * period)]


@pytest.mark.parametrize(
    ("size", "count"), [(6, 2), (18, 2), (3, 3), (8, 3), (32, 3), (4, 2), (5, 2), (12, 2), (16, 2)]
)
def test_hops_leave_out_the_sender_itself_where_the_plain_formula_does_not(size: int, count: int) -> None:
    period = 1
    while (count + 1) ** period < size:
        period += 1
    plain = [[j * (count + 1) ** (k % period) % size for j in range(1, count + 1)] for k in range(period)]
    assert any(0 in row for row in plain) == (size in (3, 6, 8, 18, 32))
    assert [hops(count, size, k) for k in range(period)] == [set(row) - {0} for row in plain]
    assert all(Exponential(count).peers(0, size, k).share == 1 / (len(set(plain[k]) - {0}) + 1) for k in range(period))


def test_the_period_is_counted_with_whole_numbers() -> None:
    """log(243, 3) is 4.999...: with a logarithm a world of 244 loses the hop of 243."""
    assert [hops(2, 244, k) for k in range(7)] == [
        {1, 2},
        {3, 6},
        {9, 18},
        {27, 54},
        {81, 162},
        {243, 486 % 244},
        {1, 2},
    ]


@pytest.mark.parametrize(
    ("size", "count"), [(2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (9, 2), (27, 2), (16, 3), (25, 4)]
)
def test_a_period_is_an_exact_average_where_the_size_is_a_power(size: int, count: int) -> None:
    period = round(math.log(size, count + 1))
    product = torch.eye(size, dtype=torch.float64)
    for k in range(period):
        product = matrix(Exponential(count), size, k) @ product
    torch.testing.assert_close(product, torch.full_like(product, 1 / size), rtol=0, atol=1e-15)


@pytest.mark.parametrize(("size", "left"), [(5, 0.202), (6, 0.217), (7, 0.125), (12, 0.209), (24, 0.207)])
def test_a_period_leaves_what_the_literature_says_elsewhere(size: int, left: float) -> None:
    product = torch.eye(size, dtype=torch.float64)
    for k in range((size - 1).bit_length()):
        product = matrix(Exponential(), size, k) @ product
    assert float(torch.linalg.matrix_norm(product - 1 / size, 2)) == pytest.approx(left, abs=6e-4)


@pytest.mark.parametrize("size", [3, 4, 5, 6, 8, 16, 32])
def test_a_ring_contracts_by_the_cosine(size: int) -> None:
    moduli = torch.linalg.eigvals(matrix(Ring(), size, 0)).abs().sort(descending=True).values
    assert float(moduli[0]) == pytest.approx(1)
    assert float(moduli[1]) == pytest.approx(math.cos(math.pi / size))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_complete_graph_averages_in_one_round(size: int) -> None:
    torch.testing.assert_close(
        matrix(Complete(), size, 5), torch.full((size, size), 1 / size, dtype=torch.float64), rtol=0, atol=1e-15
    )


def test_no_peers_at_all_is_refused() -> None:
    with pytest.raises(RecipeError, match="at least 1 peer"):
        Exponential(0)
