"""A codec of matrices sees matrices through `scatter`, and trains with it as without."""

from dataclasses import dataclass

import pytest
import torch
from tests.runtime.gym import make, parameters, train
from torch import Tensor, nn

from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Codec, Context
from gossamer.core.wire import expect
from gossamer.exchanges import Scatter
from gossamer.memories import ErrorFeedback
from gossamer.recipe import Recipe

SIZE, ROWS, COLUMNS, RANK = 4, 106, 16, 3


@dataclass(frozen=True, repr=False)
class Directions(Codec):
    """The `rank` strongest directions of every matrix, and of a vector its `rank` largest elements."""

    rank: int = RANK
    name = "directions"

    @property
    def unbiased(self) -> bool:
        return False

    def omega(self, layout: Layout) -> float:
        return float("inf")

    def wire_bytes(self, layout: Layout) -> int:
        return 4 * sum(_length(s.shape, self.rank) for s in layout.segments)

    def encode(self, block: Bucket, state: State, context: Context) -> Tensor:
        said = [t.reshape(-1) for _, view in block.tensors() for t in _parts(view, self.rank)]
        return torch.cat(said).contiguous().view(torch.uint8)

    def accumulate(self, wire: Tensor, layout: Layout, into: Tensor, weight: float) -> None:
        expect(wire, self.wire_bytes(layout), self.name)
        numbers = wire.clone().view(torch.float32)
        for s in layout.segments:
            mine, numbers = numbers.split([_length(s.shape, self.rank), numbers.numel() - _length(s.shape, self.rank)])
            into[s.offset : s.offset + s.numel] += weight * _whole(mine, s.shape, self.rank).reshape(-1)


def _length(shape: tuple[int, ...], rank: int) -> int:
    return rank * sum(shape) if len(shape) == 2 else 2 * min(rank, shape[0])


def _parts(view: Tensor, rank: int) -> tuple[Tensor, ...]:
    if view.dim() == 2:
        u, s, v = torch.linalg.svd(view, full_matrices=False)
        return (u[:, :rank] * s[:rank], v[:rank])
    places = view.abs().topk(min(rank, view.numel())).indices
    return (view[places], places.float())


def _whole(said: Tensor, shape: tuple[int, ...], rank: int) -> Tensor:
    if len(shape) == 2:
        left, right = said.split([shape[0] * rank, rank * shape[1]])
        return left.view(shape[0], rank) @ right.view(rank, shape[1])
    values, places = said.chunk(2)
    return torch.zeros(shape).index_put((places.long(),), values)


class Map(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(ROWS, COLUMNS))


def miss(model: nn.Module, rank: int, step: int) -> float:
    """Each rank is shown other points of one map; few directions hold most of what there is to learn."""
    rng = torch.Generator().manual_seed(100 * step + rank)
    w, x = model.get_parameter("w"), torch.randn(8, COLUMNS, generator=rng)
    error = x @ (w.detach() - wanted()).t()
    w.grad = error.t() @ x / 8
    return float((w.detach() - wanted()).square().mean())


def wanted() -> Tensor:
    rng = torch.Generator().manual_seed(5)
    strong = torch.randn(ROWS, 3, generator=rng) @ torch.randn(3, COLUMNS, generator=rng)
    return strong + 0.1 * torch.randn(ROWS, COLUMNS, generator=rng)


def loss_after(recipe: "str | Recipe", steps: int = 60) -> float:
    ranks = make(recipe, SIZE, Map, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    train(ranks, miss, steps)
    assert all(torch.equal(parameters(ranks)[0], p) for p in parameters(ranks))
    return float((ranks[0].model.get_parameter("w").detach() - wanted()).square().mean())


def test_a_codec_of_matrices_trains_through_scatter_as_densely() -> None:
    dense = loss_after("allreduce")
    assert loss_after(Recipe(Scatter(Directions()), ErrorFeedback())) < 2 * dense + 1e-4


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_it_sees_rows_of_the_matrix(size: int) -> None:
    of = Layout.of({"w": (ROWS, COLUMNS), "b": (COLUMNS,)})
    seen = [s for c in of.chunks(size) for s in c.segments if s.name.startswith("w")]
    assert all(s.shape[1:] == (COLUMNS,) for s in seen)
    assert sum(s.shape[0] for s in seen) == ROWS
