"""Awkward blocks, and contexts to encode them from."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.core.block import Block, Layout
from gossamer.core.contracts import Codec, Context, Echo
from gossamer.core.dice import Dice
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


def block(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Block:
    """Normal numbers in these shapes, zeros in the parameter called zero."""
    layout = Layout.of(SHAPES[name], dtype)
    flat = torch.randn(layout.numel, generator=torch.Generator().manual_seed(1000 + seed), dtype=dtype)
    made = Block(flat, layout)
    for n, view in made.tensors():
        if n == "zero":
            view.zero_()
    return made


def vector(values: Tensor) -> Block:
    return Block(values, Layout.of({"x": tuple(values.shape)}, values.dtype))


def context(rank: int = 0, size: int = 1, step: int = 1, seed: int = 7) -> Context:
    return Context(rank, size, step, Dice(seed, step, rank))


def roundtrip(codec: Codec, given: Block, at: Context | None = None) -> Tensor:
    return codec.decode(codec.encode(given, {}, at or context()), given)


def sent(echo: Echo, like: Block) -> Tensor:
    out = torch.zeros_like(like.flat)
    echo.add_sent(out, 1.0)
    return out


def agree(programs: Sequence[Program[Echo]]) -> tuple[list[Echo], Ledger]:
    """Run one exchange to its end on the simulator."""
    outcome = simulate(programs)
    return outcome.results, outcome.ledger


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
