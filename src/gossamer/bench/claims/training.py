"""One training run of a contest: virtual ranks, judged every few steps."""

from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

from torch import nn

from gossamer.bench.claims.evidence import Rows
from gossamer.bench.tune.training import TAIL, Diverged, batches_of, crew_of, judge
from gossamer.bench.workloads import get
from gossamer.recipe import Recipe
from gossamer.simulate import Replica, train


def constant(done: float) -> float:
    """The factor of a learning rate that stays."""
    return 1.0


def root_decay(done: float) -> float:
    """(1 - t/T)^.5.

    >>> root_decay(0.75)
    0.5
    """
    return (1 - done) ** 0.5


class DivergedAt(Exception):
    """A run whose loss is no number any more, with what it had written until then."""

    def __init__(self, reason: str, rows: Rows) -> None:
        super().__init__(reason)
        self.rows = rows


class ContestRun(NamedTuple):
    """What is trained, and how."""

    workload: str
    options: Mapping[str, Any]
    recipe: str
    lr: float  # in multiples of the workload's own
    steps: int
    every: int  # steps between two judgements
    ranks: int
    rate: Callable[[float], float] = constant


def trained(run: ContestRun) -> Rows:
    """The held-out quality, the training loss and the bytes of a rank so far, from before the first step on.

    >>> rows = trained(ContestRun("ridge", {}, "allreduce", lr=1.0, steps=20, every=10, ranks=2))
    >>> rows["steps"], rows["quality"][2] < rows["quality"][1] < rows["quality"][0]
    ([0, 10, 20], True)
    """
    task = get(run.workload, **run.options)
    crew = crew_of(task, Recipe.of(run.recipe), run.lr, run.ranks)
    backward = _at_rate(crew, batches_of(task, run.ranks), run.steps, run.rate)
    rows: Rows = {"steps": [0], "quality": [judge(task, crew)], "loss": [], "sent": [0]}
    while rows["steps"][-1] < run.steps:
        count = min(run.every, run.steps - int(rows["steps"][-1]))
        try:
            sent = train(crew, backward, count).ledger.sent / run.ranks
        except Diverged as error:
            raise DivergedAt(str(error), rows) from None
        rows["steps"].append(rows["steps"][-1] + count)
        rows["quality"].append(judge(task, crew))
        rows["loss"].append(fmean(loss for r in crew for loss in r.losses[-TAIL:]))
        rows["sent"].append(rows["sent"][-1] + sent)
    return rows


def _at_rate(
    crew: list[Replica],
    backward: Callable[[nn.Module, int, int], float],
    steps: int,
    rate: Callable[[float], float],
) -> Callable[[nn.Module, int, int], float]:
    """The backward pass, before which the rank's learning rate is set."""
    given = [[group["lr"] for group in r.optimizer.param_groups] for r in crew]

    def timed(model: nn.Module, rank: int, step: int) -> float:
        for group, lr in zip(crew[rank].optimizer.param_groups, given[rank], strict=True):
            group["lr"] = lr * rate(min((step - 1) / steps, 1.0))
        return backward(model, rank, step)

    return backward if rate is constant else timed
