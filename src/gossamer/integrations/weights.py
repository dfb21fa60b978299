"""Weights: what each rank's data count in averages, where shards or batches differ in size."""

from math import isfinite

import torch

from gossamer.core.errors import AttachError
from gossamer.core.verbs import Program, all_gather
from gossamer.integrations.requirements import WEIGHTED, refuse
from gossamer.runtime import Worker


def check_weight(weight: float) -> None:
    if not isinstance(weight, int | float) or not isfinite(weight) or weight < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise AttachError(
            f"weight must be a number of 0 or more, such as how many samples this rank's shard has, got {weight!r}"
        )


def refuse_weights(worker: Worker) -> None:
    """Ranks cannot count differently where who is counted changes, nor where a rank has one vote whatever it says."""
    refuse(worker.origin, *WEIGHTED)


def agree_on_weights(worker: Worker, weight: float) -> Program[None]:
    """A rank's share of all weights, times the number of ranks: 1 where all count alike.

    What a rank gives to a mean is multiplied by it, before memory and codec: then every exchange's plain mean is the weighted one.
    """
    own = torch.tensor([weight], dtype=torch.float64, device=worker.device)
    answers = yield from all_gather(own.view(torch.uint8))
    weights = [float(answer.clone().view(torch.float64)) for answer in answers]
    if len(set(weights)) == 1 and weights[0]:
        return
    if not sum(weights):
        raise AttachError("weight is 0 on all ranks: then there is nothing to average")
    refuse_weights(worker)
    worker.weights = [worker.size * each / sum(weights) for each in weights]
