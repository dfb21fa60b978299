"""One run to the end: virtual ranks in this process, on a schedule of the learning rate, judged once, when it is over."""

import gc
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import fmean

import torch
from benchmarks.end.records import Job, Outcome, Run, Study, thinned
from torch import Tensor, nn

from gossamer.bench.tune.training import Diverged, batches_of, crew_of
from gossamer.bench.workloads import Workload, get, quality
from gossamer.core.errors import GossamerError
from gossamer.core.verbs import Program
from gossamer.fabrics.sim import simulate
from gossamer.integrations.consensus import swap_in
from gossamer.integrations.shared import SharedBuffers
from gossamer.recipe import Recipe
from gossamer.simulate import Replica, train


def run(study: Study, job: Job, commit: str = "") -> Run:
    """Train a recipe to the end, or say why it cannot be."""
    return trained(study, job, commit)[0]


def trained(
    study: Study,
    job: Job,
    commit: str = "",
    workload: Workload | None = None,
    begin: Mapping[str, Tensor] | None = None,
) -> tuple[Run, nn.Module | None]:
    """The same with the model on which all ranks agree, if it ended; on other data and from another model, if they are given."""
    gc.collect()
    workload = workload or get(study.workload, seed=job.seed)
    facts = {"metric": workload.metric, "lower_is_better": workload.lower_is_better, "commit": commit}
    ended = partial(Run, study, job, held=len(workload.data.held[0]), **facts)
    try:
        recipe = Recipe.of(job.contender)
        crew = crew_of(workload, recipe, job.rate, study.ranks)
    except GossamerError as error:
        return ended(job.contender, "refused", error=str(error)), None
    if begin is not None:
        for replica in crew:
            replica.model.load_state_dict(begin)
    # As many samples for everybody: a step of several micro-batches counts as so many.
    steps = study.steps // recipe.schedule.shape.micro_batches
    _lay_channels_last(crew)
    began = time.process_time()
    outcome, error, sent = _train(study, workload, crew, steps)
    told: dict[str, float | None] = {}
    if outcome == "ended":
        told = _judge(workload, crew)
        if told["quality"] is None:
            outcome, error = "diverged", "the held-out loss is not finite"
    losses = [fmean(each) for each in zip(*(r.losses for r in crew))]
    record = ended(
        repr(recipe),
        outcome,
        error=error,
        curve=thinned(losses),
        sent=round(sent / study.ranks),
        steps=steps,
        processor_seconds=round(time.process_time() - began, 1),
        **told,
    )
    return record, crew[0].model if outcome == "ended" else None


def _lay_channels_last(crew: list[Replica]) -> None:
    """Pictures go on with their channels last from the first convolution: a step of `fashion` takes two thirds of the time.

    Most of it is pooling, which is slow where channels lie apart. Parameters and gradients lie as they did.
    """
    for replica in crew:
        for convolution in [m for m in replica.model.modules() if isinstance(m, nn.Conv2d)][:1]:
            convolution.register_forward_hook(
                lambda module, given, made: made.contiguous(memory_format=torch.channels_last)
            )


def _train(study: Study, workload: Workload, crew: list[Replica], steps: int) -> tuple[Outcome, str, int]:
    backward = on_schedule(study, crew, batches_of(workload, study.ranks), steps)
    try:
        return "ended", "", train(crew, backward, steps).ledger.sent
    except Diverged as error:
        return "diverged", str(error), 0
    except GossamerError as error:  # what is refused at the first step that needs it
        return "refused" if crew[0].worker.step == 1 else "diverged", str(error), 0


def on_schedule(
    study: Study, crew: list[Replica], backward: Callable[[nn.Module, int, int], float], steps: int
) -> Callable[[nn.Module, int, int], float]:
    """A backward pass that first sets its rank's learning rate for this step."""
    groups = [[(group, group["lr"]) for group in r.optimizer.param_groups] for r in crew]
    each = study.steps // steps  # micro-batches of a step

    def scheduled(model: nn.Module, rank: int, step: int) -> float:
        for group, lr in groups[rank]:
            group["lr"] = lr * study.factor((step - 1) * each + 1)
        return backward(model, rank, step)

    return scheduled


def _judge(workload: Workload, crew: list[Replica]) -> dict[str, float | None]:
    """Quality and loss of the model on which all ranks agree: what a user would publish."""
    simulate([_agree(r) for r in crew])
    model = crew[0].model
    found = workload.evaluate(model)
    loss = found
    if not workload.lower_is_better:
        loss = quality.mean(model, workload.data.held, partial(workload.loss, model))
    return {"quality": _known(found) if math.isfinite(loss) else None, "loss": _known(loss)}


def _agree(replica: Replica) -> Program[None]:
    yield from replica.worker.reopen()
    yield from swap_in(replica.worker, SharedBuffers(replica.model, replica.worker, "consensus"))
    yield from replica.worker.rest()


def _known(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
