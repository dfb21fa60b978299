"""Measures how much the ranks' gradients differ, to choose between minibatch averaging and local steps."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.core.errors import GossamerError
from gossamer.core.verbs import Program, all_reduce

LITTLE, MUCH = 0.5, 5.0  # values of `ratio` at which the best recipe changed in docs/heterogeneity.md


class Heterogeneity(NamedTuple):
    """How much the ranks' gradients differ at one model.

    `unlike` estimates zeta^2 = mean_m |grad F_m - grad F|^2, without bias, so that it may be below zero where ranks are alike;
    `noise` the variance of one micro-batch's gradient within a rank, its trace; `gradient` |grad F|^2. `diversity` is
    mean_m |g_m|^2 / |g|^2 of the gradients as they were drawn.

    >>> Heterogeneity(4, 8, unlike=1.0, noise=4.0, gradient=16.0, diversity=1.1).ratio
    0.25
    """

    ranks: int
    micro_batches: int
    unlike: float
    noise: float
    gradient: float
    diversity: float

    @property
    def ratio(self) -> float:
        """zeta divided by the norm of the mean gradient."""
        if self.unlike <= 0:
            return 0.0
        return (self.unlike / self.gradient) ** 0.5 if self.gradient > 0 else float("inf")

    @property
    def advice(self) -> str:
        """The kind of recipe to use. Measure at the start of training, since the ratio grows as gradients shrink."""
        if self.ratio < LITTLE:
            return "the ranks are much alike: local steps, such as local_sgd or slowmo"
        if self.ratio < MUCH:
            return "the ranks differ: short rounds, or inner_outer with a small inner rate; compare with minibatch"
        return "the ranks differ much: minibatch, or allreduce; local steps would drift apart"


def heterogeneity(gradients: Iterable[Tensor], size: int) -> Program[Heterogeneity]:
    """Compare the ranks' gradients of a few micro-batches each, equally many, at a model that all of them hold.

    zeta^2 = mean_m |g_m|^2 - |g|^2 - (1 - 1/M) noise / K, with noise = mean_m sum_k |g_mk - g_m|^2 / (K - 1).

    Costs a dense all-reduce of one gradient, and four numbers.
    """
    own, squares, count = torch.zeros((), dtype=torch.float32), torch.zeros((), dtype=torch.float64), 0
    for gradient in gradients:
        own = own + gradient
        squares, count = squares + gradient.double().square().sum().cpu(), count + 1
    counted = torch.tensor([count, -count], dtype=torch.float64)
    most, least = (yield from all_reduce(counted.to(own.device), "max")).tolist()
    if most != -least or count < 2 or size < 2:
        raise GossamerError(
            f"heterogeneity compares at least 2 ranks by equally many micro-batches, at least 2 of each: there are {size} rank(s), "
            f"and between {-least:.0f} and {most:.0f} micro-batches on each"
        )
    mean = own / count
    length = mean.double().square().sum().cpu()
    within = (squares - count * length) / (count - 1)
    lengths, noise = ((yield from all_reduce(torch.stack([length, within]).to(own.device))) / size).tolist()
    common = float(((yield from all_reduce(mean.clone())) / size).double().square().sum())
    return Heterogeneity(
        ranks=size,
        micro_batches=count,
        unlike=lengths - common - (1 - 1 / size) * noise / count,
        noise=noise,
        gradient=common - noise / (count * size),
        diversity=lengths / common if common else float("inf"),
    )


def gradients_of(losses: Iterable[Tensor], parameters: Sequence[Tensor]) -> Iterator[Tensor]:
    """The flat gradient of each loss, computed without changing `.grad` or running hooks."""
    for loss in losses:
        found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        flat = torch.cat([(g.to_dense() if g.is_sparse else g).reshape(-1) for g in found])
        yield flat.to(torch.promote_types(flat.dtype, torch.float32))
