"""The quadratic family: machines whose curvatures and gradients differ by as much as one likes, and whose mean stays.

F_m(x) = x' L (I + h D_m) x / 2 + zeta s_m' x,   L = diag(i^-2), 50 dimensions, sum s_m = 0, mean |s_m|^2 = 1, sum D_m = 0.
"""

import torch
from torch import Tensor, nn

from gossamer.bench.claims.evidence import Rows
from gossamer.core.schedule import Share
from gossamer.simulate import replicas, train

MACHINES, WIDE = 10, 50
ZETAS = (0.0, 1.0, 3.0, 10.0, 30.0, 100.0)
RATES = 2.0 ** torch.arange(-14, 3, dtype=torch.float64)
SPECTRUM = torch.arange(1, WIDE + 1, dtype=torch.float64) ** -2
SCALE = RATES.sqrt().view(1, -1, 1)
FAR = 1e6  # where a rate is hopeless, gradients are cut, so that its numbers stay finite


class Rows17(nn.Module):
    """All rates and all zeta side by side: with x = sqrt(rate) w, plain SGD of rate 1 on w is SGD of that rate on x."""

    def __init__(self) -> None:
        super().__init__()
        start = 2 * torch.arange(1, WIDE + 1, dtype=torch.float64) ** -0.5
        self.w = nn.Parameter((start / SCALE).expand(len(ZETAS), -1, -1).clone())


def _machines() -> tuple[Tensor, Tensor]:
    """What differs between machines: linear terms and curvatures, each with mean zero."""
    rng = torch.Generator().manual_seed(0)
    linear = torch.randn(MACHINES, WIDE, generator=rng, dtype=torch.float64)
    linear -= linear.mean(0)
    curves = 2 * torch.rand(MACHINES, WIDE, generator=rng, dtype=torch.float64) - 1
    curves -= curves.mean(0)
    return linear / linear.square().sum(1).mean().sqrt(), curves / curves.abs().max()


def measure(seed: int, recipe: str, steps: int, curved: float) -> Rows:
    """The final loss for each zeta, at the best of 17 constant rates."""
    linear, curves = _machines()
    spread = torch.tensor(ZETAS, dtype=torch.float64).view(-1, 1, 1)
    noises = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(MACHINES)]

    def backward(model: nn.Module, rank: int, step: int) -> float:
        w = model.get_parameter("w")
        noise = torch.randn(WIDE, generator=noises[rank], dtype=torch.float64) / WIDE**0.5
        bent = SPECTRUM * (1 + curved * curves[rank]) * SCALE * w.detach()
        w.grad = SCALE * (bent + spread * linear[rank] + noise).clamp(-FAR, FAR)
        return 0.0

    crew = replicas(recipe, Rows17, lambda model: torch.optim.SGD(model.parameters(), lr=1.0), MACHINES)
    train(crew, backward, steps)
    shares: list[Share] | None = crew[0].worker.recipe.schedule.consensus_share(crew[0].worker.loop)
    x = SCALE * (crew[0].flat() if shares is None else shares[0].value).view(len(ZETAS), -1, WIDE)
    losses = ((SPECTRUM * x**2).sum(2) / 2).nan_to_num(torch.inf).min(1).values
    return {"zeta": [*ZETAS], "loss": losses.tolist()}
