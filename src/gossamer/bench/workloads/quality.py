"""How good a model is on data it never saw, and the two tasks of most workloads: classes, and the next token."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from gossamer.bench.workloads.contract import Workload
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


@dataclass(frozen=True, kw_only=True)
class Classifier(Workload):
    """Rows are (input, label); the model scores classes."""

    metric: ClassVar[str] = "held-out accuracy"
    lower_is_better: ClassVar[bool] = False

    def inputs(self, raw: Tensor) -> Tensor:
        """What the model sees of a row's input."""
        return raw

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(model(self.inputs(batch[0])), batch[1])

    def evaluate(self, model: nn.Module) -> float:
        raw, labels = self.data.held
        return accuracy(model, (self.inputs(raw), labels))


@dataclass(frozen=True, kw_only=True)
class LanguageModel(Workload):
    """Rows are tokens; the model returns its mean loss over the next token of each."""

    metric: ClassVar[str] = "held-out loss (nats/token)"
    lower_is_better: ClassVar[bool] = True

    batch_size: int = 4
    length: int = 32  # tokens of context

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(*batch)

    def evaluate(self, model: nn.Module) -> float:
        return mean(model, self.data.held, partial(self.loss, model))
