"""A topology as matrices."""

import torch
from torch import Tensor

from gossamer.core.contracts import Topology
from gossamer.core.topology import rounds


def matrix(topology: Topology, size: int, round: int) -> Tensor:
    """P[j, i] is the share of its mass that i sends to j."""
    p = torch.zeros(size, size, dtype=torch.float64)
    for i in range(size):
        peers = topology.peers(i, size, round)
        p[i, i] = peers.keep
        for j, share in zip(peers.to, peers.shares, strict=True):
            p[j, i] += share
    return p


def product(topology: Topology, size: int) -> Tensor:
    """What a whole period does."""
    out = torch.eye(size, dtype=torch.float64)
    for k in rounds(topology, size):
        out = matrix(topology, size, k) @ out
    return out


def moduli(p: Tensor) -> list[float]:
    """Of its eigenvalues, the largest first."""
    return sorted((float(v) for v in torch.linalg.eigvals(p).abs()), reverse=True)
