"""A workload: a real model, real data and a number that says how good the model has become."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import blake2b
from typing import Any, ClassVar, TypeVar, dataclass_transform

import torch
from torch import Tensor, nn

from gossamer.bench.workloads.errors import WorkloadError
from gossamer.bench.workloads.shards import Batch, BatchOf, Data, grouped, iid
from gossamer.core import plugins
from gossamer.core.parts import nearest
from gossamer.core.text import shown

W = TypeVar("W", bound="Workload")


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    """A frozen value: two with the same fields give the same model, the same batches and the same quality.

    Law: model, batch and data follow from the fields alone, in every process, and no global random state is touched.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    metric: ClassVar[str]
    lower_is_better: ClassVar[bool]
    group: ClassVar[str]  # what `shards` may go by instead of "iid"

    seed: int = 0
    shards: str = "iid"
    batch_size: int = 0  # samples per rank and step

    def __post_init__(self) -> None:
        for f in fields(self):
            value, wanted = getattr(self, f.name), type(f.default)
            if type(value) is not wanted and not (wanted is float and type(value) is int):
                raise WorkloadError(f"{self.name}: {f.name} must be of type {wanted.__name__}, not {value!r}")
            if wanted is int and f.name != "seed" and value < 1:
                raise WorkloadError(f"{self.name}: {f.name} must be at least 1, not {value}")
            if wanted is float and not 0 <= value < math.inf:
                raise WorkloadError(f"{self.name}: {f.name} must be finite and not negative, not {value}")
        if not -(2**63) <= self.seed < 2**63:
            raise WorkloadError(f"{self.name}: seed must be a whole number of 64 bits, not {shown(self.seed)}")
        if self.shards not in ("iid", self.group):
            raise WorkloadError(f"{self.name} has no shards {self.shards!r}: choose 'iid' or {self.group!r}")

    @abstractmethod
    def load(self) -> Data:
        """Fetch, read and split the data: may take seconds, and on the very first use needs the network."""

    @abstractmethod
    def network(self) -> nn.Module:
        """A fresh model, drawn from torch's default generator; `model` seeds that one first and restores it after."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer that reached the stated quality."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """What training makes small: a scalar, the mean over the batch."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> float:
        """The metric on held-out data; leaves the model as it was."""

    @cached_property
    def data(self) -> Data:
        """The data, loaded on first use. Call `prepare` where the network is still there, such as outside a lab."""
        return self.load()

    def prepare(self) -> None:
        """Fetch and cache everything, so that later processes find it on disk."""
        _ = self.data

    def model(self) -> nn.Module:
        """The model before training: the same on every rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.network()

    def batch(self, step: int, rank: int, size: int) -> Batch:
        """One rank's samples at one step."""
        train, at = self.data.train, BatchOf(step, rank, size)
        if self.shards == "iid":
            rows = iid(len(train[0]), self.batch_size, at, self.seed)
        else:
            rows = grouped(self.data.groups, self.batch_size, at, self.seed)
        return tuple(tensor[rows] for tensor in train)

    def fingerprint(self) -> str:
        """A hash of the data: hosts whose fingerprints differ (another Python, another Debian) train on other data."""
        digest = blake2b(digest_size=8)
        for tensor in (*self.data.train, *self.data.held, self.data.groups):
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


_workloads: dict[str, type[Workload]] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def workload(name: str) -> Callable[[type[W]], type[W]]:
    """Make a class a workload: a frozen dataclass, found by name."""

    def register(cls: type[W]) -> type[W]:
        if name in _workloads:
            raise ValueError(f"two workloads are called {name!r}")
        cls.name = name
        _workloads[name] = made = dataclass(frozen=True, kw_only=True)(cls)
        return made

    return register


def names() -> list[str]:
    """All workloads.

    >>> "lm" in names()
    True
    """
    return sorted(_workloads)


def find(name: str) -> type[Workload]:
    """The class of that name: its summary, metric and options, without loading anything."""
    if name not in _workloads and not (plugins.load_plugins() and name in _workloads):
        raise WorkloadError(f"there is no workload called {name!r}. {nearest(name, names())}")
    return _workloads[name]


def get(name: str, **options: Any) -> Workload:
    """A workload by name.

    >>> get("lm", seed=1).batch_size
    4
    """
    found = find(name)
    known = [f.name for f in fields(found)]
    for key in options:
        if key not in known:
            raise WorkloadError(f"{name} has no option {key!r}. {nearest(key, known)}")
    return found(**options)
