"""Awkward blocks, and contexts to encode them from."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, Layout
from gossamer.core.contracts import Codec, Context, ReduceResult
from gossamer.core.rng import CounterRng
from gossamer.core.verbs import Program
from gossamer.fabrics.ledger import Ledger
from gossamer.fabrics.sim import simulate

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "several": {"a": (7, 9), "zero": (5,), "b": (31,), "none": (0, 3), "one": (1,), "scalar": ()},
    "matrices": {"w": (24, 20), "v": (20, 24), "bias": (24,), "turned": (24, 20)},
    "long": {"w": (1283,)},
    "one element": {"x": (1,)},
    "two elements": {"x": (2,)},
    "no element": {"x": (0, 3)},
    "no parameter": {},
}
FILLED = [name for name, shapes in SHAPES.items() if torch.zeros(Layout.of(shapes).numel).numel() > 1]


def block(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Bucket:
    """Normal numbers in these shapes, zeros in the parameter called zero. A copy, for some tests write over it."""
    drawn = _drawn(name, dtype, seed)
    return drawn.like(drawn.flat.clone())


@cache  # each law asks for the same few, for every codec
def _drawn(name: str, dtype: torch.dtype, seed: int) -> Bucket:
    layout = Layout.of(SHAPES[name], dtype)
    flat = torch.randn(layout.numel, generator=torch.Generator().manual_seed(1000 + seed), dtype=dtype)
    made = Bucket(flat, layout)
    for n, view in made.tensors():
        if n == "zero":
            view.zero_()
    return made


def vector(values: Tensor) -> Bucket:
    return Bucket(values, Layout.of({"x": tuple(values.shape)}, values.dtype))


def context(rank: int = 0, size: int = 1, step: int = 1, seed: int = 7) -> Context:
    return Context(rank, size, step, CounterRng(seed, step, rank))


def roundtrip(codec: Codec, given: Bucket, at: Context | None = None) -> Tensor:
    return codec.decode(codec.encode(given, {}, at or context()), given)


def sent(result: ReduceResult, like: Bucket) -> Tensor:
    out = torch.zeros_like(like.flat)
    result.add_sent(out, 1.0)
    return out


def agree(programs: Sequence[Program[ReduceResult]]) -> tuple[list[ReduceResult], Ledger]:
    """Run one exchange to its end on the simulator."""
    outcome = simulate(programs)
    return outcome.results, outcome.ledger


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
