"""The two tasks that most workloads have: to tell classes apart, and to predict the next token."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from gossamer.bench.workloads import quality
from gossamer.bench.workloads.contract import Workload
from gossamer.bench.workloads.shards import Batch


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
        return quality.accuracy(model, (self.inputs(raw), labels))


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
        return quality.mean(model, self.data.held, partial(self.loss, model))
