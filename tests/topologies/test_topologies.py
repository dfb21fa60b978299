"""Topologies: pure arithmetic about who sends to whom."""

import math
from dataclasses import dataclass

import pytest
import torch
from tests.laws.samples import topologies
from tests.topologies.matrices import matrix, moduli, product

from gossamer.core.binding import Binding
from gossamer.core.contracts import Peers, Topology
from gossamer.core.errors import AttachError, RecipeError
from gossamer.core.topology import rounds
from gossamer.mixers.weights import metropolis
from gossamer.topologies import Bipartite, Complete, Exponential, Graph, Ring, Switch, TwoWay

ALL = [*topologies(), *(Exponential(p) for p in (4, 7)), TwoWay(Exponential()), Graph("0>1 1>0; 1>2 2>1:.25; 2>0")]
REGULAR = [t for t in ALL if not isinstance(t, Graph)]
ROUNDS = range(7)


def sizes(topology: Topology, most: int) -> list[int]:
    """The worlds that it is for."""
    fitting = list[int]()
    for size in range(1, most):
        try:
            topology.fits(Binding(size, ()))
        except AttachError:
            continue
        fitting.append(size)
    return fitting


def hops(count: int, size: int, round: int) -> set[int]:
    return set(Exponential(count).peers(0, size, round).to)


@pytest.mark.parametrize("topology", ALL, ids=repr)
def test_every_sender_has_its_receiver_and_nobody_meets_itself(topology: Topology) -> None:
    assert len(sizes(topology, 41)) > 1
    for size in sizes(topology, 41):
        for round in ROUNDS:
            peers = [topology.peers(rank, size, round) for rank in range(size)]
            for i, (to, source, _) in enumerate(peers):
                assert i not in to
                assert i not in source
                assert len(set(to)) == len(to)
                assert len(set(source)) == len(source)
                assert all(0 <= j < size for j in (*to, *source))
                assert all(i in peers[j].source for j in to)
                assert all(i in peers[j].to for j in source)
                assert len(peers[i].shares) == len(to)
                assert min(1, peers[i].keep, *peers[i].shares) > 0


@pytest.mark.parametrize("topology", ALL, ids=repr)
def test_rounds_come_again_after_a_period(topology: Topology) -> None:
    for size in sizes(topology, 14):
        period = topology.period(size)
        for round in rounds(topology, size):
            for rank in range(size):
                assert topology.peers(rank, size, round) == topology.peers(rank, size, round + 3 * period)


@pytest.mark.parametrize("topology", ALL, ids=repr)
def test_mass_is_conserved_and_regular_graphs_are_doubly_stochastic(topology: Topology) -> None:
    for size in sizes(topology, 25):
        p = matrix(topology, size, 3)
        torch.testing.assert_close(p.sum(0), torch.ones(size, dtype=torch.float64))
        if topology in REGULAR:
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
    assert Exponential(count).period(size) == round(math.log(size, count + 1))
    found = product(Exponential(count), size)
    torch.testing.assert_close(found, torch.full_like(found, 1 / size), rtol=0, atol=1e-15)


@pytest.mark.parametrize(("size", "left"), [(5, 0.202), (6, 0.217), (7, 0.125), (12, 0.209), (24, 0.207)])
def test_a_period_leaves_what_the_literature_says_elsewhere(size: int, left: float) -> None:
    found = product(Exponential(), size)
    assert float(torch.linalg.matrix_norm(found - 1 / size, 2)) == pytest.approx(left, abs=6e-4)


@pytest.mark.parametrize("size", [3, 4, 5, 6, 8, 16, 32])
def test_a_ring_contracts_by_the_cosine(size: int) -> None:
    first, second, *_ = moduli(matrix(Ring(), size, 0))
    assert first == pytest.approx(1)
    assert second == pytest.approx(math.cos(math.pi / size))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_complete_graph_averages_in_one_round(size: int) -> None:
    torch.testing.assert_close(
        matrix(Complete(), size, 5), torch.full((size, size), 1 / size, dtype=torch.float64), rtol=0, atol=1e-15
    )


def test_no_peers_at_all_is_refused() -> None:
    with pytest.raises(RecipeError, match="at least 1 peer"):
        Exponential(0)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32])
def test_matchings_of_a_power_of_two_are_an_exact_average(size: int) -> None:
    found = product(Bipartite(), size)
    torch.testing.assert_close(found, torch.full_like(found, 1 / size), rtol=0, atol=1e-15)


@pytest.mark.parametrize("size", [2, 6, 10, 14, 24])
def test_a_matching_joins_an_even_and_an_odd_rank_both_ways(size: int) -> None:
    for round in range(8):
        for rank in range(size):
            (partner,), source, share = Bipartite().peers(rank, size, round)
            assert (source, share) == ((partner,), 0.5)
            assert (partner - rank) % 2 == 1
            assert Bipartite().peers(partner, size, round).to == (rank,)


@pytest.mark.parametrize(("size", "second"), [(3, 0), (4, 1 / 3), (5, 0.539), (6, 2 / 3), (8, 0.805), (16, 0.949)])
def test_a_ring_both_ways_contracts_as_the_literature_says(size: int, second: float) -> None:
    p = matrix(TwoWay(Ring()), size, 0)
    assert torch.equal(p, p.T)
    assert metropolis(TwoWay(Ring()), 0, size, 0) == [1 / 3, 1 / 3]
    assert moduli(p)[1] == pytest.approx(second, abs=6e-4)
    assert moduli(p)[1] == pytest.approx(max(0, (1 + 2 * math.cos(2 * math.pi / size)) / 3))


def test_two_ranks_of_a_ring_both_ways_have_one_neighbour() -> None:
    assert TwoWay(Ring()).peers(0, 2, 0) == Peers((1,), (1,), 0.5)


def test_metropolis_weights_of_a_star_are_doubly_stochastic() -> None:
    star = Graph("0-1 0-2 0-3 0-4")
    w = torch.eye(5, dtype=torch.float64)
    for i in range(5):
        for j, weight in zip(star.peers(i, 5, 0).to, metropolis(star, i, 5, 0), strict=True):
            w[i, j], w[i, i] = weight, w[i, i] - weight
    torch.testing.assert_close(w.sum(1), torch.ones(5, dtype=torch.float64))
    assert torch.equal(w, w.T)
    assert moduli(w)[1] == pytest.approx(0.8)


def test_one_topology_follows_another() -> None:
    switch = Switch(Exponential(2), 3, Ring())
    assert [switch.peers(0, 9, k).to for k in range(5)] == [(1, 2), (3, 6), (1, 2), (1,), (1,)]
    assert rounds(switch, 9) == range(3, 4)
    assert Switch(switch, 2, Ring()).stages == (Exponential(2), Ring(), Ring())
    assert TwoWay(switch).stages == (TwoWay(Exponential(2)), TwoWay(Ring()))
    assert Ring().stages == (Ring(),)


def test_a_graph_of_edges_shares_alike_or_as_it_is_told() -> None:
    graph = Graph("0>1:.25 0-2, 1-2; 2>0")
    assert graph.size == 3
    assert graph.peers(0, 3, 0) == Peers((1, 2), (2,), (0.25, 1 / 3))
    assert graph.peers(2, 3, 0) == Peers((0, 1), (0, 1), (1 / 3, 1 / 3))
    assert graph.peers(2, 3, 1) == Peers((0,), (), (0.5,))
    assert graph.peers(1, 3, 3) == Peers((), (), ())


def test_a_graph_of_matrices_has_their_shares() -> None:
    p = [[[0.5, 0.0, 0.3], [0.2, 0.6, 0.0], [0.3, 0.4, 0.7]], [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]]
    graph = Graph.of(*p)
    assert graph.period(3) == 2
    for k in range(4):
        torch.testing.assert_close(matrix(graph, 3, k), torch.tensor(p[k % 2], dtype=torch.float64))


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ([[0.5, 0.5], [0.4, 0.5]], "not column-stochastic: column 0.*has the sum 0.9"),
        ([[1.5, 0.5], [-0.5, 0.5]], "not column-stochastic: column 0.*-0.5"),
        ([[0.0, 0.5], [1.0, 0.5]], "not column-stochastic.*rank 0 gives rank 1.*keeps 0"),
        ([[1.0, 0.5], [0.0, 0.5]], "not connected: among 2 ranks.*rank 0 never sends news to rank 1.*add the edges"),
        ([[1.0, 0.0]], "as many rows as columns"),
    ],
)
def test_matrices_that_lose_mass_or_leave_somebody_out_are_refused(columns: list[list[float]], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        Graph.of(columns)


@pytest.mark.parametrize(
    ("edges", "words"),
    [
        ("", "no edges given; list them, such as"),
        ("0>", "'0>' is not an edge; write '0>1'"),
        ("0>0 0-1", "without itself"),
        ("0-1 1>0", "1>0 is listed twice"),
        ("0-1 2-3", "not connected: among 4 ranks.*never receives news of ranks 2, 3"),
        ("0-1; 2-3; 2>1", "rank 0 never sends news to ranks 2, 3"),
        ("0>1:.6 0>2:.4 1>0 2>0", "not column-stochastic.*rank 0 gives ranks 1, 2.*keeps 0"),
    ],
)
def test_edges_that_make_no_sound_graph_are_refused(edges: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        Graph(edges)


def test_a_graph_may_be_connected_only_over_its_period() -> None:
    assert Graph("0-1; 1-2; 2-3").period(4) == 3


@dataclass(frozen=True, repr=False)
class Lonely(Topology):
    """Not registered: everybody sends two ahead: odd ranks hear nothing of even ones where their number is even."""

    def peers(self, rank: int, size: int, round: int) -> Peers:
        return Peers(((rank + 2) % size,), ((rank - 2) % size,), 0.5)


def test_worlds_in_which_a_topology_would_never_agree_are_refused() -> None:
    Lonely().fits(Binding(5, ()))
    with pytest.raises(
        AttachError, match="among 4 ranks, over its period of 1 rounds, rank 0 never receives news of ranks 1, 3"
    ):
        Lonely().fits(Binding(4, ()))
    with pytest.raises(AttachError, match=r"of 5 ranks one would have no partner.*two_way\(ring\(\)\)"):
        Bipartite().fits(Binding(5, ()))
    with pytest.raises(AttachError, match="is of 3 ranks, and this world has 4"):
        Graph("0-1 1-2").fits(Binding(4, ()))
