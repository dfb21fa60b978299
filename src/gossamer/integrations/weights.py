"""Weights: weigh ranks in averages, if their shards or batches differ in size."""

from math import isfinite

import torch

from gossamer.core.errors import AttachError
from gossamer.core.verbs import Program, all_gather
from gossamer.integrations.requirements import WEIGHTED, refuse
from gossamer.runtime import Worker


def check_weight(weight: float) -> None:
    """Raise an error if the weight is not a finite number of 0 or more."""
    if not isinstance(weight, int | float) or not isfinite(weight) or weight < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise AttachError(
            f"weight must be a number of 0 or more, such as the number of samples in this rank's shard, got {weight!r}"
        )


def refuse_weights(worker: Worker) -> None:
    """Refuse recipes that cannot weigh ranks, such as those that wait for some ranks only, or that vote."""
    refuse(worker.origin, *WEIGHTED)


def agree_on_weights(worker: Worker, weight: float) -> Program[None]:
    """Set each rank's weight to its share of all weights, times the number of ranks: 1 if all weights are equal.

    A rank multiplies its values by its weight before memory and codec, so the plain mean of any exchange is the weighted mean.
    """
    own = torch.tensor([weight], dtype=torch.float64, device=worker.device)
    answers = yield from all_gather(own.view(torch.uint8))
    weights = [float(answer.clone().view(torch.float64)) for answer in answers]
    if len(set(weights)) == 1 and weights[0]:
        return
    if not sum(weights):
        raise AttachError(
            "weight is 0 on all ranks, so there is nothing to average; give at least one rank a positive weight"
        )
    refuse_weights(worker)
    worker.ranks.weights = [worker.size * each / sum(weights) for each in weights]
