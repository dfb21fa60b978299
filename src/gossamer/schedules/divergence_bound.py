"""Divergence bound: do ranks with their own anchors stay together, when only gossip mixes them?"""

import torch
from torch import Tensor

from gossamer.core.contracts import Mixer, Topology
from gossamer.core.errors import AttachError
from gossamer.core.schedule import Schedule
from gossamer.schedules.rounds import OuterStep

WINDOWS = 8  # rounds checked: they differ if the topology's period does not divide a round


def divergence_rate(outer: OuterStep, base: Schedule, every: int, size: int) -> float:
    """Return the factor by which ranks' distance from their mean grows per round; below 1 they stay together.

    A difference that a round's mixing multiplies by L follows (a, v) -> outer step of (1 - L) a. If a topology has
    several stages, the worst of them counts.
    """
    return max(_growth(outer, stage, every // base.shape.period, size) for stage in _topology(base.shape.mixer).stages)


def _growth(outer: OuterStep, topology: Topology, messages: int, size: int) -> float:
    worst = 0.0
    for window in range(WINDOWS):
        mixed = torch.eye(size, dtype=torch.float64)
        for k in range(window * messages, (window + 1) * messages):
            mixed = _shares(topology, size, k) @ mixed
        if (mixed.sum(1) - 1).abs().max() > 1e-9:
            raise AttachError(
                f"{topology} on {size} ranks: some ranks have more weight than others, so without an average models follow "
                "those ranks and not the mean; use a topology that is the same for all ranks, such as exponential(), or average=True"
            )
        apart = mixed - 1 / size  # without the mean itself
        worst = max(worst, *(_factor(outer, complex(value)) for value in torch.linalg.eigvals(apart)))
    return worst


def _factor(outer: OuterStep, kept: complex) -> float:
    """Return the largest eigenvalue of the outer step on a difference that mixing multiplies by `kept`."""
    gone, beta, alpha = 1 - kept, outer.beta, outer.alpha
    times = alpha * (1 + beta) if outer.nesterov else alpha
    of_velocity = alpha * beta * (beta if outer.nesterov else 1.0)
    step = torch.tensor([[1 - times * gone, -of_velocity], [gone, beta]], dtype=torch.complex128)
    return float(torch.linalg.eigvals(step).abs().max())


def _topology(mixer: Mixer | None) -> Topology:
    topology = getattr(mixer, "topology", None)
    if not isinstance(topology, Topology):
        raise AttachError(
            f"{mixer} has no topology, and without an average the topology must keep ranks together; use push_sum(), or average=True"
        )
    return topology


def _shares(topology: Topology, size: int, round: int) -> Tensor:
    """Return the matrix of a round: column i holds the shares that rank i sends and keeps."""
    out = torch.zeros(size, size, dtype=torch.float64)
    for rank in range(size):
        peers = topology.peers(rank, size, round)
        for other, share in zip(peers.to, peers.shares, strict=True):
            out[other, rank] = share
        out[rank, rank] = peers.keep
    return out
