"""Minibatch or local SGD? It depends on how unlike the ranks' data are.

python examples/heterogeneity.py [--rounds 20] [--gradients 10 50] [--both]

Ten machines, each with its own quadratic; how unlike their gradients are is `zeta`, and the mean of all is the same whatever
it is. In every round each machine may compute K gradients, and one average crosses the network: minibatch SGD takes all K at
one point, accelerated minibatch SGD likewise, local SGD steps with each, and `--both` steps locally at a smaller rate than it
takes over the round. Each gets the best of 17 constant learning rates, and what is printed is the final loss above the optimum.

    F_m(x) = x' L (I + h D_m) x / 2 + zeta s_m' x,   L = diag(i^-2), d = 50, sum s_m = 0, mean |s_m|^2 = 1, sum D_m = 0, h = .9

with noise N(0, 1/d) in each coordinate of a gradient. All rates and all zeta are rows of one parameter and train side by side:
with x = sqrt(rate) w, plain SGD of rate 1 on w is SGD of that rate on x, and the same holds for averages and acceleration.
"""

import argparse

import torch
from torch import Tensor, nn

from gossamer.core.schedule import Share
from gossamer.simulate import Replica, replicas, train

MACHINES, DIMENSIONS, CURVED = 10, 50, 0.9
ZETAS = (0.0, 1.0, 3.0, 10.0, 30.0, 100.0)
RATES = 2.0 ** torch.arange(-14, 3, dtype=torch.float64)
INNER = (0.0, 0.01, 0.03, 0.1, 0.3)  # of `inner_outer`, besides 1, which is local SGD
SPECTRUM = torch.arange(1, DIMENSIONS + 1, dtype=torch.float64) ** -2
FAR = 1e6  # where a rate is hopeless, gradients are cut, so that its numbers stay finite


def machines() -> tuple[Tensor, Tensor]:
    """What is unlike: s_m and D_m."""
    rng = torch.Generator().manual_seed(0)
    linear = torch.randn(MACHINES, DIMENSIONS, generator=rng, dtype=torch.float64)
    linear -= linear.mean(0)
    linear /= linear.square().sum(1).mean().sqrt()
    curves = 2 * torch.rand(MACHINES, DIMENSIONS, generator=rng, dtype=torch.float64) - 1
    curves -= curves.mean(0)
    return linear, curves / curves.abs().max()


SCALE = RATES.sqrt().view(1, -1, 1)
LINEAR, CURVES = machines()
SPREAD = torch.tensor(ZETAS, dtype=torch.float64).view(-1, 1, 1)


class Rows(nn.Module):
    """Where all start: x_i = 2 / sqrt(i), for every zeta and rate."""

    def __init__(self) -> None:
        super().__init__()
        start = 2 * torch.arange(1, DIMENSIONS + 1, dtype=torch.float64) ** -0.5
        self.w = nn.Parameter((start / SCALE).expand(len(ZETAS), -1, -1).clone())


def backward(model: nn.Module, rank: int, step: int) -> float:
    """One gradient. The noise is the same in all rows, and another at every rank and every gradient."""
    w, rng = model.get_parameter("w"), DICE[rank]
    noise = torch.randn(DIMENSIONS, generator=rng, dtype=torch.float64) / DIMENSIONS**0.5
    x = SCALE * w.detach()
    gradient = SPECTRUM * (1 + CURVED * CURVES[rank]) * x + SPREAD * LINEAR[rank] + noise
    w.grad = SCALE * gradient.clamp(-FAR, FAR)
    return 0.0


DICE = [torch.Generator() for _ in range(MACHINES)]


def judged(replica: Replica) -> Tensor:
    """The model that the theory is about, after a whole round."""
    shares: list[Share] | None = replica.worker.recipe.schedule.consensus_share(replica.worker.loop)
    flat = replica.flat() if shares is None else shares[0].value
    return SCALE * flat.view(len(ZETAS), -1, DIMENSIONS)


def best(recipe: str, steps: int) -> list[float]:
    """For each zeta, the final loss under the best rate."""
    for rank, rng in enumerate(DICE):
        rng.manual_seed(rank)
    ranks = replicas(recipe, Rows, lambda model: torch.optim.SGD(model.parameters(), lr=1.0), MACHINES)
    train(ranks, backward, steps)
    losses = (SPECTRUM * judged(ranks[0]) ** 2).sum(2) / 2
    return losses.nan_to_num(torch.inf).min(1).values.tolist()


def rows(rounds: int, k: int, both: bool) -> dict[str, list[float]]:
    """The algorithms at equal rounds and gradients, and so at equal bytes."""
    out = {
        "minibatch": best(f"minibatch({k})", rounds),
        "accelerated": best(f"accelerated({k})", rounds),
        "local SGD": best(f"local_sgd({k})", rounds * k),
    }
    if both:
        tried = [out["local SGD"], *(best(f"inner_outer({k}, inner={inner})", rounds * k) for inner in INNER)]
        out["inner and outer"] = [min(losses) for losses in zip(*tried, strict=True)]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--gradients", type=int, nargs="+", default=[10, 50])
    parser.add_argument("--both", action="store_true", help="tune an inner and an outer rate as well")
    args = parser.parse_args()
    print("| R, K | algorithm | " + " | ".join(f"zeta {z:g}" for z in ZETAS) + " |")
    print("| --- | --- |" + " ---: |" * len(ZETAS))
    for k in args.gradients:
        for name, losses in rows(args.rounds, k, args.both).items():
            print(f"| {args.rounds}, {k} | {name} | " + " | ".join(f"{v:.4f}" for v in losses) + " |", flush=True)


if __name__ == "__main__":
    main()
