"""Dion's update: orthonormal low-rank steps for matrices, by one step of power iteration on the momentum."""

from typing import Annotated, final

import torch
from torch import Tensor

from gossamer.codecs.powersgd import first_directions, matrix_shape, orthogonal
from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Context, Update
from gossamer.core.errors import AttachError
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice


@final
@part("dion_update", sample="dion_update(2)")
class DionUpdate(Update):
    """Move each matrix along `rank` orthonormal directions of its momentum, all equally far.

    M += (1 - mu) g, of n rows and m columns;  P = orth(M Q);  R = M^T P;  M -= (1 - mu) P R^T;
    Q = R with columns of length one;  x -= lr sqrt(n / m) P Q^T. What is applied fades from the momentum by mu, and what is not
    stays whole, as in error feedback. The iteration starts from the last Q, so that P Q^T comes near to the leading singular
    directions, with values of one, over the steps; at full rank to the orthonormal factor of M, as in Muon.

    Each rank sends its M. Through `allreduce(powersgd(rank, min_ratio=1.0)) + error_feedback()` only P and R
    travel, and the residual is what a rank's own momentum has beyond the common one: the steps are those of an exact exchange, but
    for rounding. A column of R that is zero, up to rounding, moves nothing, and Q keeps its direction.

    Matrices of the model, tensors of more dimensions among them (first dimension by the rest), belong to SGD without momentum;
    vectors get their mean gradient as it is, from another optimizer if one likes, which may have momentum.

    Use: the preset `dion` combines all three.

    Not for: models without large matrices, nor busy processors. All matrices of a model move so, embeddings and output
    layers among them.

    Wire: nothing of its own. Memory: one copy of the model, beside the residual.

    >>> from gossamer.core.rng import CounterRng
    >>> mean = Bucket.of({"w": torch.outer(torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0]))})
    >>> DionUpdate(1).direction(mean, mean, {}, Context(0, 1, 1, CounterRng(0, 1, 0))).view(2, 2)
    tensor([[0.3600, 0.4800],
            [0.4800, 0.6400]])

    Paper: Ahn et al., Dion: Distributed Orthonormalized Updates, 2025.
    """

    rank: Annotated[int, Choice(4, 8, 16, 32, 64)]
    momentum: float = 0.95

    def __post_init__(self) -> None:
        require(self.rank >= 1, f"dion_update: rank must be at least 1, got {self.rank}")
        require(0 <= self.momentum < 1, f"dion_update: momentum must lie in [0, 1), got {self.momentum}; 0.95 is usual")

    @property
    def sends_momentum(self) -> bool:
        return True

    def fits(self, binding: Binding) -> None:
        """Refuse a model without a matrix, and momentum in an optimizer of matrices."""
        shapes = [matrix_shape(s.shape) for layout in binding.layouts for s in layout.segments]
        if shapes and not any(n * m for n, m in shapes):
            raise AttachError(
                f"{self}: the model has no matrix, and vectors get their gradients as they are; leave it out"
            )
        theirs = [o for o in binding.optimizers if any(p.dim() > 1 for g in o.param_groups for p in g["params"])]
        without = "powersgd(4) in the recipe has none of its own"
        binding._replace(optimizers=theirs).refuse_momentum(self, 1.0, without)

    def sent(self, gradient: Bucket, state: State, scale: float) -> Tensor:
        for _, given in gradient.tensors():
            if given.dim() > 1:
                # So that it is a running mean, as large as the vectors' gradients, for clipping.
                given.mul_(1 - self.momentum)
        return gradient.flat.add_(state["kept"], alpha=scale) if "kept" in state else gradient.flat

    def direction(self, mean: Bucket, model: Bucket, state: State, context: Context) -> Tensor:
        out, kept = mean.new().copy_(mean.flat), mean.new().zero_()
        rows = zip(mean.tensors(), mean.like(out).tensors(), mean.like(kept).tensors(), strict=True)
        for (name, given), (_, moves), (_, stays) in rows:
            n, m = matrix_shape(tuple(given.shape))
            if n * m:
                q = state.get(f"q:{name}")
                q = first_directions(context, name, min(n, m, self.rank), m).to(given) if q is None else q
                state[f"q:{name}"] = self._step(given.view(n, m), q, moves.view(n, m), stays.view(n, m))
        state["kept"] = kept
        return out

    def _step(self, mean: Tensor, q: Tensor, moves: Tensor, stays: Tensor) -> Tensor:
        """Write one matrix's direction and what its momentum keeps; Q^T and P^T are rows, as in PowerSGD. Returns the next Q^T."""
        top = torch.linalg.vector_norm(mean, ord=torch.inf)
        unit = torch.where(top > 0, top, torch.ones_like(top))
        scaled = torch.div(mean, unit, out=stays)
        p = orthogonal((q @ scaled.t()).unsqueeze(0)).squeeze(0)
        r = p @ scaled
        lengths = torch.linalg.vector_norm(r, dim=1, keepdim=True)
        found = lengths > lengths.amax() * max(mean.shape) * torch.finfo(mean.dtype).eps
        directions = torch.where(found, r / lengths, 0.0)
        torch.mm(p.t(), directions, out=moves).mul_((mean.shape[0] / mean.shape[1]) ** 0.5)
        stays.addmm_(p.t(), r, alpha=self.momentum - 1).mul_(unit)
        return torch.where(found, directions, q)
