"""The consensus rate of compressed gossip, found by a small simulation with random vectors."""

from functools import cache

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, Layout
from gossamer.core.contracts import Codec, Context, Topology
from gossamer.core.rng import CounterRng
from gossamer.mixers.weights import metropolis

TRIED = Layout.of({"x": (256,)})
_ROUNDS, _RATES = 40, (1.0, 0.5, 0.25, 0.1, 0.05, 0.025, 0.01, 0.005)


def damping(codec: Codec, layout: Layout) -> float:
    """Return the factor for an unbiased codec's output that makes it a contraction: 1 / (1 + omega)."""
    return 1 / (1 + codec.omega(layout)) if codec.unbiased else 1.0


@cache
def consensus_rate(codec: Codec, topology: Topology, size: int) -> float:
    """Return the rate with which random vectors come closest to their mean in a few rounds; equal on all ranks.

    >>> from gossamer.codecs import FP32, TopK
    >>> from gossamer.topologies import Ring, TwoWay
    >>> consensus_rate(FP32(), TwoWay(Ring()), 4), consensus_rate(TopK(0.01), TwoWay(Ring()), 4)
    (1.0, 0.05)
    """
    best, least = _RATES[-1], float("inf")
    for rate in _RATES:
        left = _spread_after(codec, topology, size, rate)
        if least < float("inf") and left > 0.9 * least:  # the larger rate is as good, or better
            break
        best, least = (rate, left) if left < least else (best, least)
    return best


def _spread_after(codec: Codec, topology: Topology, size: int, rate: float) -> float:
    weights = _matrix(topology, size)
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(size, TRIED.numel, generator=numbers, dtype=torch.float32, device="cpu")
    believed = x.clone()
    # As far from the neighbours' copies as from one another.
    x += torch.randn(x.shape, generator=numbers, dtype=torch.float32, device="cpu")
    for step in range(_ROUNDS):
        believed = believed + torch.stack([_told(codec, x[i] - believed[i], i, size, step) for i in range(size)])
        x = x + rate * (weights @ believed - believed)
    left = float((x - x.mean(0)).norm())
    return left if left < float("inf") else float("inf")


def _told(codec: Codec, news: Tensor, rank: int, size: int, step: int) -> Tensor:
    block = Bucket(news, TRIED)
    wire = codec.encode(block, {}, Context(rank, size, step, CounterRng(0, step, rank)))
    return codec.decode(wire, block) * damping(codec, TRIED)


def _matrix(topology: Topology, size: int) -> Tensor:
    """Return the mixing matrix W: row i holds rank i's weights of all models."""
    out = torch.eye(size, dtype=torch.float32, device="cpu")
    for i in range(size):
        for j, weight in zip(topology.peers(i, size, 0).to, metropolis(topology, i, size, 0)):
            out[i, j] = weight
            out[i, i] -= weight
    return out
