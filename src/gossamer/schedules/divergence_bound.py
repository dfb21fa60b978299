"""Apart: whether ranks that step from anchors of their own stay together, when only their neighbours pull them."""

import torch
from torch import Tensor

from gossamer.core.contracts import Mixer, Topology
from gossamer.core.errors import AttachError
from gossamer.core.schedule import Schedule
from gossamer.schedules.rounds import OuterStep

WINDOWS = 8  # rounds that are looked at: where a topology's own rounds do not divide them, they differ


def divergence_rate(outer: OuterStep, base: Schedule, every: int, size: int) -> float:
    """How many times as far from their mean ranks are after a round, in the long run; below 1 they stay together.

    A difference that a round's mixing multiplies by L follows (a, v) -> outer step of (1 - L) a. Where one topology follows
    another, what counts is the worst of them.
    """
    return max(_growth(outer, stage, every // base.period, size) for stage in _topology(base.drives).stages)


def _growth(outer: OuterStep, topology: Topology, messages: int, size: int) -> float:
    worst = 0.0
    for window in range(WINDOWS):
        mixed = torch.eye(size, dtype=torch.float64)
        for k in range(window * messages, (window + 1) * messages):
            mixed = _shares(topology, size, k) @ mixed
        if (mixed.sum(1) - 1).abs().max() > 1e-9:
            raise AttachError(
                f"{topology} on {size} ranks: some are heard more than others, so that without an average models follow "
                "them and not the mean; use a topology that is alike for all, such as exponential(), or average=True"
            )
        apart = mixed - 1 / size  # the mean itself is no difference
        worst = max(worst, *(_factor(outer, complex(value)) for value in torch.linalg.eigvals(apart)))
    return worst


def _factor(outer: OuterStep, kept: complex) -> float:
    """The largest eigenvalue of the outer step on one such difference."""
    gone, beta, alpha = 1 - kept, outer.beta, outer.alpha
    times = alpha * (1 + beta) if outer.nesterov else alpha
    of_velocity = alpha * beta * (beta if outer.nesterov else 1.0)
    step = torch.tensor([[1 - times * gone, -of_velocity], [gone, beta]], dtype=torch.complex128)
    return float(torch.linalg.eigvals(step).abs().max())


def _topology(mixer: Mixer | None) -> Topology:
    topology = getattr(mixer, "topology", None)
    if not isinstance(topology, Topology):
        raise AttachError(
            f"{mixer} does not say who hears from whom, and without an average that decides: use push_sum()"
        )
    return topology


def _shares(topology: Topology, size: int, round: int) -> Tensor:
    """What every rank (a column) gives to whom in a round."""
    out = torch.zeros(size, size, dtype=torch.float64)
    for rank in range(size):
        peers = topology.peers(rank, size, round)
        for other, share in zip(peers.to, peers.shares, strict=True):
            out[other, rank] = share
        out[rank, rank] = peers.keep
    return out
