"""Seconds of a request, against each formula by hand."""

from dataclasses import replace
from math import ceil, log2

import pytest
import torch

from gossamer.core.verbs import AllGather, AllReduce, AllToAll, Receive, Send, TakeTicket
from gossamer.costs import Cluster, Hosts, crossing_of
from gossamer.costs.events import RequestTime
from gossamer.fabrics.links import ClusterLinks

RATE, LATENCY, B = 1e6, 1e-3, 4096
EXACT = {"ring": 1.0, "pairs": 1.0, "one": 1.0, "shared": 1.0}


def cluster(nodes: int, ranks: int = 1, backend: str = "gloo") -> Cluster:
    hosts = Hosts(count=nodes, ranks=ranks, up=RATE, latency=LATENCY)
    return Cluster(hosts=(hosts,), payload=1.0, efficiency=EXACT, backend=backend)  # pyright: ignore[reportArgumentType]


def wire(length: int) -> torch.Tensor:
    return torch.empty(length, dtype=torch.uint8, device="meta")


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_ring(size: int) -> None:
    ring = crossing_of(AllReduce(wire(B * size)), 0, cluster(size), size)
    assert ring.seconds(cluster(size)) == pytest.approx(2 * (size - 1) * (LATENCY + B / RATE))
    gather = crossing_of(AllGather(wire(B)), 0, cluster(size), size)
    assert gather.seconds(cluster(size)) == pytest.approx((size - 1) * (LATENCY + B / RATE))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_pairs(size: int) -> None:
    pairs = crossing_of(AllToAll([wire(B)] * size, [B] * size), 0, cluster(size), size)
    assert pairs.seconds(cluster(size)) == pytest.approx((size - 1) * (LATENCY + B / RATE))


@pytest.mark.parametrize("size", [2, 4, 64])
def test_pairs_over_nccl_are_sent_at_once(size: int) -> None:
    """In one latency, where they were charged one for each other rank; their bytes share the card as ever."""
    here = cluster(size, 1, "nccl")
    pairs = crossing_of(AllToAll([wire(B)] * size, [B] * size), 0, here, size)
    assert pairs.seconds(here) == pytest.approx(LATENCY + (size - 1) * B / RATE)
    inside = cluster(1, size, "nccl")
    within = crossing_of(AllToAll([wire(B)] * size, [B] * size), 0, inside, size)
    assert within.latency_seconds(inside) == pytest.approx(inside.latency_inside)


def test_a_message_and_a_ticket() -> None:
    four = cluster(4)
    assert crossing_of(Send(1, wire(B)), 0, four, 4).seconds(four) == pytest.approx(LATENCY + B / RATE)
    assert crossing_of(Receive(3, B), 0, four, 4).seconds(four) == pytest.approx(LATENCY + B / RATE)
    assert crossing_of(TakeTicket("step"), 0, four, 4).seconds(four) == pytest.approx(2 * LATENCY)


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (4, 8), (3, 4)])
def test_what_goes_through_a_card_that_ranks_share(nodes: int, ranks: int) -> None:
    """A ring crosses a node's border once; all ranks of a node send to all ranks of the others."""
    here, size = cluster(nodes, ranks), nodes * ranks
    assert crossing_of(AllReduce(wire(B * size)), 0, here, size).card == 2 * (size - 1) * B
    assert crossing_of(AllToAll([wire(B)] * size, [B] * size), 0, here, size).card == ranks * (size - ranks) * B
    for hop in (1, ranks, ranks + 1):
        leaving = sum((r + hop) % size >= ranks for r in range(ranks))
        assert crossing_of(Send(hop, wire(B)), 0, here, size).card == leaving * B


def test_a_group_within_a_node_uses_no_card() -> None:
    here = cluster(2, 4)
    inside = crossing_of(AllReduce(wire(B), among=(0, 1, 2, 3)), 0, here, 8)
    assert (inside.card, inside.between) == (0, 0)
    first = crossing_of(AllReduce(wire(B), among=(0, 4)), 0, here, 8)
    assert first.card == B
    assert first.between > 0


@pytest.mark.parametrize(("latency", "inside"), [(1e-4, 1e-5), (0.1, 2e-5)])
def test_ranks_of_a_host_are_no_farther_apart_where_hosts_are(latency: float, inside: float) -> None:
    here = replace(cluster(2, 8), hosts=(Hosts(count=2, ranks=8, up=RATE, latency=latency),))
    near = crossing_of(AllReduce(wire(B), among=tuple(range(8))), 0, here, 16)
    assert near.latency_seconds(here) == pytest.approx(14 * inside)
    between = crossing_of(AllReduce(wire(B), among=(0, 8)), 0, here, 16)
    assert between.latency_seconds(here) == pytest.approx(2 * latency)
    links, when = ClusterLinks(here), RequestTime(0.0, 1, "w")
    assert [links.message(B, 0, to, when)[1] for to in (1, 8)] == pytest.approx([inside, latency])


def test_shards_share_a_card() -> None:
    """Eight groups of four nodes, one rank of each on a node: all eight send through the node's card at once."""
    here = cluster(4, 8)
    alone = crossing_of(AllReduce(wire(B)), 0, here, 4, sharing=8)
    assert alone.card == 8 * alone.sent == 8 * 2 * 3 * B // 4


@pytest.mark.parametrize("nodes", [2, 4, 64, 1024])
def test_nccl_takes_a_ring_or_a_tree(nodes: int) -> None:
    here = cluster(nodes, 8, "nccl")
    messages = crossing_of(AllReduce(wire(B)), 0, here, nodes * 8).between
    assert messages == min(2 * (nodes - 1), 2 * ceil(log2(nodes)))


def test_a_gather_over_nccl_crosses_as_often_as_half_of_its_ring_all_reduce() -> None:
    here = cluster(4, 8, "nccl")
    gathered = crossing_of(AllGather(wire(B)), 0, here, 32)
    assert (gathered.messages, gathered.between) == (31, 3)
    assert crossing_of(AllGather(wire(B)), 0, cluster(4, 8), 32).between == 31


def test_more_rate_and_less_latency_never_take_longer() -> None:
    slow, requests = cluster(4), (AllReduce(wire(B)), AllGather(wire(B)), AllToAll([wire(B)] * 4, [B] * 4))
    for verb in requests:
        seconds = [crossing_of(verb, 0, slow, 4).seconds(slow.at_rate(rate)) for rate in (1e5, 1e6, 1e7)]
        assert seconds == sorted(seconds, reverse=True)
