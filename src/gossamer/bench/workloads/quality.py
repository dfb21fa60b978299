"""How good a model is on data it never saw."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gossamer.bench.workloads.shards import Batch

CHUNK = 128  # rows at once: bounds memory, not quality


@contextmanager
def judging(model: nn.Module) -> Generator[None]:
    """Without gradients and dropout; every module goes back to the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def mean(model: nn.Module, held: Batch, measure: Callable[[Batch], Tensor]) -> float:
    """The mean over all rows of what `measure` says of a chunk of them (itself a mean)."""
    rows = len(held[0])
    with judging(model):
        chunks = (tuple(t[i : i + CHUNK] for t in held) for i in range(0, rows, CHUNK))
        return sum(float(measure(chunk)) * len(chunk[0]) for chunk in chunks) / rows


def accuracy(model: nn.Module, held: Batch) -> float:
    """The share of rows whose label gets the highest score. Rows are (input, label)."""
    return mean(model, held, lambda chunk: (model(chunk[0]).argmax(-1) == chunk[1]).float().mean())
