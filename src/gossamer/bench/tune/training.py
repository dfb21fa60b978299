"""One trial: virtual ranks train a workload in this process, and are judged at the end."""

import math
from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gossamer.bench.tune.knobs import at_rate
from gossamer.bench.workloads import Workload
from gossamer.planning import bytes_per_step
from gossamer.recipe import Recipe
from gossamer.simulate import Replica, replicas_of_one_body, train

TAIL = 10  # steps whose losses make the last training loss


class Diverged(Exception):
    """A loss is no number any more: what is left of the trial is not worth its time."""

    def __init__(self, step: int) -> None:
        super().__init__(f"the loss was not finite at step {step}")


class Result(NamedTuple):
    """How a trial ended. Quality and loss are not finite where it diverged."""

    steps: int
    quality: float  # on held-out data: the mean over the ranks' models
    loss: float  # of training, the mean over the last steps
    sent: int  # bytes of one rank, the mean over ranks
    error: str = ""


class Length(NamedTuple):
    """How long a trial is: at most so many steps, and at most so many bytes that a rank sends."""

    steps: int
    budget: int | None = None
    momenta: int = 1  # tensors that the optimizer keeps of each parameter

    def of(self, recipe: Recipe, parameters: dict[str, Tensor], ranks: int) -> int:
        """Steps of this recipe, to the last end of a round that is within, where its models agree; 0 if there is none.

        A recipe whose round is longer than that is judged in the middle of it.
        """
        most = self.steps
        if self.budget is not None:
            sent = bytes_per_step(recipe, parameters, ranks, momenta=self.momenta)
            most = min(most, int(self.budget / sent)) if sent else most
        rests = (step for step in range(most, 0, -1) if recipe.schedule.ends_round(step))
        return next(rests, most)


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


def run(workload: Workload, recipe: Recipe, lr: float, steps: int, ranks: int) -> Result:
    """Train at a multiple of the workload's learning rate. The workload's seed is that of the data, the model and all dice.

    >>> from gossamer.bench import workloads
    >>> result = run(workloads.get("ridge"), Recipe.of("qsgd"), 1.0, steps=50, ranks=4)
    >>> result.steps, result.quality < 0.2
    (50, True)
    """
    crew = crew_of(workload, recipe, lr, ranks)
    try:
        sent = train(crew, batches_of(workload, ranks), steps).ledger.sent
    except Diverged as error:
        return Result(len(crew[0].losses), math.nan, math.nan, 0, str(error))
    quality = judge(workload, crew)
    loss = fmean(loss for replica in crew for loss in replica.losses[-TAIL:])
    why = "" if math.isfinite(quality) else "the held-out quality is not finite"
    return Result(steps, quality, loss, round(sent / ranks), why)


def crew_of(workload: Workload, recipe: Recipe, lr: float, ranks: int) -> list[Replica]:
    """Virtual ranks that train at a multiple of the workload's learning rate."""
    said, left = at_rate(recipe, lr)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = workload.optimizer(model)
        for group in made.param_groups:
            group["lr"] = group["lr"] * left
        return made

    return replicas_of_one_body(said, workload.model, optimizer, ranks, workload.seed)


def batches_of(workload: Workload, ranks: int) -> Callable[[nn.Module, int, int], float]:
    """A backward pass on the next batch. No rank sees one twice, whatever a schedule or a controller accumulates."""
    drawn = [0] * ranks

    def backward(model: nn.Module, rank: int, step: int) -> float:
        drawn[rank] = max(drawn[rank], step - 1) + 1
        loss = workload.loss(model, workload.batch(drawn[rank] - 1, rank, ranks))
        if not bool(loss.isfinite()):
            raise Diverged(step)
        loss.backward()
        return float(loss.detach())

    return backward


def judge(workload: Workload, crew: list[Replica]) -> float:
    """Each rank judges the model it has, as `compare` does; equal ones are judged once."""
    kept = [list(r.model.state_dict().values()) for r in crew]
    if all(torch.equal(a, b) for other in kept[1:] for a, b in zip(kept[0], other, strict=True)):
        return workload.evaluate(crew[0].model)
    return fmean(workload.evaluate(r.model) for r in crew)
