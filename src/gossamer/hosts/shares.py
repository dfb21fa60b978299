"""Unequal machines: ranks agree who takes how many samples, and what each of them then counts in averages."""

import torch

from gossamer.core.errors import GossamerError
from gossamer.core.shares import check, planned
from gossamer.core.verbs import Program, all_gather
from gossamer.hosts.handshake import agree
from gossamer.hosts.weights import refuse_weights
from gossamer.worker import Worker


def share_out(worker: Worker, samples: int, seconds: float, most: int | None, now: list[int]) -> Program[list[int]]:
    """The plan of all ranks, the same on each; a rank's values count by its share from then on."""
    refusal = None
    try:
        check(samples, seconds, most, worker.size)
        refuse_weights(worker)
    except GossamerError as error:
        refusal = error
    yield from agree(refusal, worker.device)
    if refusal is not None:
        raise refusal
    own = torch.tensor([samples, seconds, most or samples], dtype=torch.float64, device=worker.device)
    answers = yield from all_gather(own.view(torch.uint8))
    told = [answer.clone().view(torch.float64).tolist() for answer in answers]
    if len({t[0] for t in told}) > 1:
        raise GossamerError(
            f"ranks ask for shares of unlike numbers of samples, {[int(t[0]) for t in told]}; say the same on all: that of a step"
        )
    caps = [int(t[2]) for t in told]
    if sum(caps) < samples:
        raise GossamerError(
            f"{samples} samples do not fit: ranks take {caps} at most; say fewer samples, or a larger most"
        )
    plan = planned(samples, [t[1] for t in told], caps, now)
    if plan != now:
        _refuse_learned(worker)
    worker.weight = worker.size * plan[worker.rank] / samples if len(set(plan)) > 1 else 1.0
    return plan


def _refuse_learned(worker: Worker) -> None:
    """What has been learned of the mean is right for the shares of then."""
    for channel in worker.channels:
        if any(channel.memory.policy(key) == "equal" for key in channel.states["memory"]):
            raise GossamerError(
                f"{channel.memory} has learned what the mean is made of, and other shares would make another one of it; share out "
                "before the first step, or use error_feedback()"
            )
