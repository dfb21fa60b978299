"""Weights of ranks in averages: as given, or as ranks plan how many samples each takes."""

from math import isfinite
from time import perf_counter
from typing import NamedTuple

import torch

from gossamer.core.errors import AttachError, GossamerError
from gossamer.core.load_balance import check, planned
from gossamer.core.verbs import Program
from gossamer.integrations.checks.requirements import WEIGHTED, refuse
from gossamer.integrations.handshake import agree, numbers_of_all
from gossamer.runtime import ReplicaRanks, Worker

EARLY, EVERY = (0, 3, 8, 16, 32), 64  # calls of `share` at which ranks plan: a few early ones, then every 64th


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
    weights = [each for (each,) in (yield from numbers_of_all([weight], torch.float64, worker.device))]
    if len(set(weights)) == 1 and weights[0]:
        return
    if not sum(weights):
        raise AttachError(
            "weight is 0 on all ranks, so there is nothing to average; give at least one rank a positive weight"
        )
    refuse_weights(worker)
    worker.ranks.weights = [worker.size * each / sum(weights) for each in weights]


class _Mark(NamedTuple):
    """Clock, seconds waited for other ranks so far, and step, at one moment."""

    clock: float
    waited: float
    step: int


class Stopwatch:
    """Measures the seconds per sample of a rank: the time between calls of `share`, without waiting for other ranks.

    All ranks call it equally often, so all plan at the same calls.
    """

    def __init__(self) -> None:
        self._calls, self._laps, self._since = 0, list[float](), None

    def start(self, waited: float, step: int) -> None:
        """Start to measure."""
        self._since = _Mark(perf_counter(), waited, step)

    def stop(self, waited: float, step: int, share: int) -> bool:
        """Record the seconds per sample since the start; True if ranks plan at this call."""
        since: _Mark | None = self._since
        if since is not None and step > since.step:
            busy = perf_counter() - since.clock - (waited - since.waited)
            self._laps.append(busy / (share * (step - since.step)))
        call, self._calls = self._calls, self._calls + 1
        return call in EARLY or call % EVERY == 0

    def seconds(self, weight: float) -> float:
        """Return the mean seconds per sample since the last call, without the longest time: it may contain an evaluation or a
        compilation.

        Without a measurement, as before the first step, return the inverse of `weight`: this rank's share is then in
        proportion to its weight.
        """
        laps, self._laps = sorted(self._laps), []
        kept = laps[:-1] or laps
        return max(sum(kept) / len(kept), 1e-9) if kept else 1 / max(weight, 1e-9)


def _slowest_of_a_replica(
    replica: ReplicaRanks, samples: int, seconds: float, most: int | None
) -> tuple[float, int | None]:
    """What all shards of a replica plan with: the seconds of its slowest rank, and what fits into each of them.

    Else each shard would plan by its own clock, and a model be put together of means of other weights.
    """
    if replica.size == 1:
        return seconds, most
    slowest, fits, least, greatest = replica.least([-seconds, samples if most is None else most, samples, -samples])
    if least != -greatest:
        raise GossamerError(
            f"comm.share(samples) differs between the ranks of a replica, from {least:g} to {-greatest:g}; pass the same number on all "
            "ranks"
        )
    return -slowest, int(fits)


def share_out(worker: Worker, samples: int, seconds: float, most: int | None, now: list[int]) -> Program[list[int]]:
    """Plan the shares of all ranks, the same plan on each; from then on a rank's weight is its share."""
    refusal = None
    try:
        seconds, most = _slowest_of_a_replica(worker.replica, samples, seconds, most)
        check(samples, seconds, most, worker.size)
        refuse_weights(worker)
    except GossamerError as error:
        refusal = error
    yield from agree(refusal, worker.device)
    if refusal is not None:
        raise refusal
    replies = yield from numbers_of_all([samples, seconds, most or samples], torch.float64, worker.device)
    if len({t[0] for t in replies}) > 1:
        raise GossamerError(
            f"comm.share(samples) differs between ranks, {[int(t[0]) for t in replies]} by rank; pass the same number on all ranks: "
            "the samples of one step"
        )
    caps = [int(t[2]) for t in replies]
    if sum(caps) < samples:
        raise GossamerError(
            f"{samples} samples do not fit: ranks take at most {caps}; pass fewer samples, or a larger `most`"
        )
    plan = planned(samples, [t[1] for t in replies], caps, now)
    if plan != now:
        _refuse_learned(worker)
    worker.ranks.weights = [worker.size * share / samples for share in plan] if len(set(plan)) > 1 else ()
    return plan


def _refuse_learned(worker: Worker) -> None:
    """Refuse new shares if a memory has learned the mean under the old ones."""
    for bucket in worker.buckets:
        if any(bucket.memory.policy(key) == "equal" for key in bucket.states["memory"]):
            raise GossamerError(
                f"comm.share() changes the shares, but {bucket.memory} has learned the mean under the old ones; call share before "
                "the first step, or use error_feedback()"
            )
