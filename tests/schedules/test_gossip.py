"""Gossip with exact averages: an all-reduce first, and again now and then; and what is left without weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from tests.mixers.story import NUMEL, disagreeing, quadratics, spread, still, targets
from tests.runtime.gym import Flat, bit_equal, held, make, parameters, sgd, train
from torch import Tensor

from gossamer.codecs import FP32
from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Context, Mixer, Topology
from gossamer.core.verbs import Program
from gossamer.core.wire import pack, take
from gossamer.exchanges import AllReduced
from gossamer.fabrics.sim import Network
from gossamer.mixers import PushSum
from gossamer.mixers.push_sum import deliver
from gossamer.recipe import Recipe
from gossamer.schedules import Gossip
from gossamer.topologies import Graph

UNBALANCED = Graph("0>1 1>2 2>3 3>4 4>0 0>2 0>3 3>1 4>2")


@dataclass(frozen=True, repr=False)
class BiasedPush(Mixer):
    """A baseline, not registered: push-sum without its weight, so that the model is x itself."""

    topology: Topology

    def numerator(self, block: Bucket, state: State) -> Tensor:
        return block.flat

    def push(self, block: Bucket, state: State, context: Context, round: int) -> Program[list[Tensor]]:
        peers = self.topology.peers(context.rank, context.size, round)
        wires = [pack(block.flat * share) for share in peers.shares]
        state["keep"] = torch.tensor(peers.keep, dtype=torch.float64)
        return deliver(wires, peers, block.numel * block.flat.element_size())

    def absorb(self, block: Bucket, state: State, arrived: Sequence[Tensor]) -> Tensor:
        kept = block.flat * float(state["keep"])
        return kept + sum((take(w, kept.dtype, block.numel)[0] for w in arrived), torch.zeros_like(kept))

    def wrote(self, block: Bucket, state: State) -> None:
        state.clear()


@pytest.mark.parametrize(
    ("mixer", "settles_at_the_mean"), [(PushSum(UNBALANCED), True), (BiasedPush(UNBALANCED), False)]
)
def test_without_weights_an_unbalanced_graph_settles_elsewhere(mixer: Mixer, settles_at_the_mean: bool) -> None:
    ranks = disagreeing(Recipe(AllReduced(FP32()), schedule=Gossip(mixer)), 5)
    start = torch.stack(parameters(ranks))
    train(ranks, still, 80)
    end = torch.stack(parameters(ranks))
    error = float((end - start.mean(0)).abs().max())
    assert error < 1e-12 if settles_at_the_mean else error > 0.1
    torch.testing.assert_close(torch.stack([held(r) for r in ranks]).sum(0), start.sum(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("gossip", ["warmup=12", "warmup=12, overlap=True, every=2"])
def test_a_warm_up_is_an_all_reduce(gossip: str, momentum: float) -> None:
    gossiping = make(f"allreduce + gossip({gossip})", 3, lambda: Flat(NUMEL), sgd(0.1, momentum))
    reducing = make("allreduce", 3, lambda: Flat(NUMEL), sgd(0.1, momentum))
    for _ in range(12):
        train(gossiping, targets, 1)
        train(reducing, targets, 1)
        assert bit_equal(parameters(gossiping))
        torch.testing.assert_close(parameters(gossiping)[0], parameters(reducing)[0], rtol=0, atol=1e-14)
    train(gossiping, targets, 2)
    assert not bit_equal(parameters(gossiping))


@pytest.mark.parametrize("mixer", ["push_sum()", f"push_sum({UNBALANCED})", "symmetric()", "choco(qsgd(), gamma=0.5)"])
@pytest.mark.parametrize("schedule", ["exact=4", "exact=4, overlap=True", "exact=5, every=2, overlap=True"])
def test_an_exact_average_gathers_what_is_on_its_way(mixer: str, schedule: str) -> None:
    """Of the sum nothing is lost, and for a moment all models are equal."""
    ranks = disagreeing(f"allreduce + gossip({mixer}, {schedule})", 5)
    mean, often = torch.stack(parameters(ranks)).mean(0), int(schedule[6])
    train(ranks, still, often - 1)
    assert not bit_equal(parameters(ranks))
    train(ranks, still, 1)
    assert bit_equal(parameters(ranks))
    torch.testing.assert_close(parameters(ranks)[0], mean, rtol=0, atol=1e-6 if "choco" in mixer else 1e-14)
    train(ranks, targets, often)
    assert bit_equal(parameters(ranks))


def test_exact_averages_keep_a_slow_graph_together() -> None:
    apart = [
        make(r, 8, lambda: Flat(NUMEL), sgd(0.1, 0.0))
        for r in ("sgp(topology=ring())", "gossip_pga(4, topology=ring())")
    ]
    for ranks in apart:
        train(ranks, targets, 37)  # one after an average
    assert spread(parameters(apart[1])) < 0.7 * spread(parameters(apart[0]))
    for ranks in apart:
        mean = torch.stack(parameters(ranks)).mean(0)
        torch.testing.assert_close(mean, quadratics(8).mean(0), rtol=0, atol=0.05)


def test_delays_change_no_bit() -> None:
    recipe = f"allreduce + gossip(push_sum({UNBALANCED}), every=2, overlap=True, exact=6)"
    slow, fast = disagreeing(recipe, 5, lr=0.1), disagreeing(recipe, 5, lr=0.1)
    train(slow, targets, 13, Network(latency=0.9, rate=(1e3, 1e2, 1e4, 1e3, 2e2)), lambda rank, step: 1.0 + rank)
    train(fast, targets, 13)
    assert all(bit_equal(pair) for pair in zip(parameters(slow), parameters(fast), strict=True))


def test_an_average_that_is_not_finite_is_not_taken() -> None:
    ranks = disagreeing("gossip_pga(2)", 4)
    train(ranks, still, 1)
    ranks[1].model.get_parameter("x").data[0] = float("nan")
    before = parameters(ranks)
    train(ranks, still, 1)
    assert all(bit_equal(pair) for pair in zip(before, parameters(ranks), strict=True))
    assert [r.worker.record.dropped_rounds for r in ranks] == [1] * 4
