"""Unequal machines: ranks agree who takes how many samples, and what each of them then counts in averages."""

from time import perf_counter
from typing import NamedTuple

import torch

from gossamer.core.errors import GossamerError
from gossamer.core.load_balance import check, planned
from gossamer.core.verbs import Program, all_gather
from gossamer.integrations.handshake import agree
from gossamer.integrations.weights import refuse_weights
from gossamer.runtime import Worker

EARLY, EVERY = (0, 3, 8, 16, 32), 64  # the calls of `share` after which ranks plan anew: soon, and then now and then


class _Mark(NamedTuple):
    """Where a rank stood: the clock, how long it has waited for others so far, and its step."""

    clock: float
    waited: float
    step: int


class Stopwatch:
    """Seconds that a sample takes a rank: those between calls of `share`, without what it waited for others.

    All ranks call as often, so that all plan anew at the same calls.
    """

    def __init__(self) -> None:
        self._calls, self._laps, self._since = 0, list[float](), None

    def start(self, waited: float, step: int) -> None:
        self._since = _Mark(perf_counter(), waited, step)

    def stop(self, waited: float, step: int, share: int) -> bool:
        """Note what a sample took since the start; True if this is a call after which ranks plan anew."""
        since: _Mark | None = self._since
        if since is not None and step > since.step:
            busy = perf_counter() - since.clock - (waited - since.waited)
            self._laps.append(busy / (share * (step - since.step)))
        call, self._calls = self._calls, self._calls + 1
        return call in EARLY or call % EVERY == 0

    def seconds(self, weight: float) -> float:
        """Of one sample, by the steps since it was last asked, the longest left out: it may hold an evaluation, or a compiler.

        Where nothing was timed, as before the first step, it is what gives this rank a share as large as it counts.
        """
        laps, self._laps = sorted(self._laps), []
        kept = laps[:-1] or laps
        return max(sum(kept) / len(kept), 1e-9) if kept else 1 / max(weight, 1e-9)


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
    worker.weights = [worker.size * share / samples for share in plan] if len(set(plan)) > 1 else ()
    return plan


def _refuse_learned(worker: Worker) -> None:
    """What has been learned of the mean is right for the shares of then."""
    for bucket in worker.buckets:
        if any(bucket.memory.policy(key) == "equal" for key in bucket.states["memory"]):
            raise GossamerError(
                f"{bucket.memory} has learned what the mean is made of, and other shares would make another one of it; share out "
                "before the first step, or use error_feedback()"
            )
