"""Weights of ranks in averages: as given, or as ranks plan how many samples each takes."""

from collections.abc import Callable
from math import isfinite
from time import perf_counter
from typing import NamedTuple

import torch

from gossamer.core.errors import AttachError, GossamerError, PeerError
from gossamer.core.load_balance import check, planned
from gossamer.core.stream_events import DeviceMoment
from gossamer.core.verbs import MembersChanged, Program
from gossamer.fabrics.ledger import Ledger
from gossamer.fabrics.torch.fabric import TorchFabric
from gossamer.integrations.checks.requirements import WEIGHTED, refuse
from gossamer.integrations.handshake import agree, numbers_of_all
from gossamer.integrations.joint_consensus import outlive, up_to_a_change
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
    """A call of `share`: its moment, seconds waited for other ranks so far, and the step."""

    moment: DeviceMoment
    waited: float
    step: int


class _CallSpan(NamedTuple):
    """Steps with so many samples each, from one call to a later one."""

    began: _Mark
    ended: _Mark
    share: int

    def seconds(self) -> float:
        """Return the seconds per sample. A GPU works behind the host: it is waited for, and its own clock counts."""
        took = self.ended.moment.seconds_since(self.began.moment)
        waited = self.ended.waited - self.began.waited
        return (took - waited) / (self.share * (self.ended.step - self.began.step))


class Stopwatch:
    """Measures the seconds per sample of a rank: the time between calls of `share`, without waiting for other ranks.

    All ranks call it equally often, so all plan at the same calls.
    """

    def __init__(self, worker: Worker, ledger: Ledger) -> None:
        self._worker, self._ledger = worker, ledger
        self._calls, self._laps = 0, list[_CallSpan]()
        self._since: _Mark | None = None

    def start(self) -> None:
        self._since = self._now()

    def stop(self, share: int) -> bool:
        """Record the steps since the start; True if ranks plan at this call."""
        since, now = self._since, self._now()
        if since is not None and now.step > since.step:
            self._laps.append(_CallSpan(since, now, share))
        call, self._calls = self._calls, self._calls + 1
        return call in EARLY or call % EVERY == 0

    def seconds(self) -> float:
        """Return the mean seconds per sample since the last call, without the longest time: it may contain an evaluation or a
        compilation.

        Without a measurement, as before the first step, return the inverse of this rank's weight: its share is then in
        proportion to that.
        """
        laps, self._laps = sorted(lap.seconds() for lap in self._laps), []
        kept = laps[:-1] or laps
        return max(sum(kept) / len(kept), 1e-9) if kept else 1 / max(self._worker.ranks.weight, 1e-9)

    def _now(self) -> _Mark:
        moment = DeviceMoment(self._worker.device, perf_counter())
        return _Mark(moment, self._ledger.exposed_seconds, self._worker.step)


class Shares:
    """The samples of each rank, as `comm.share` has planned them last."""

    def __init__(self, worker: Worker, fabric: TorchFabric, members_just_came: Callable[[], bool]) -> None:
        self._worker, self._fabric, self._members_just_came = worker, fabric, members_just_came
        self._begin_anew()

    def mine(self, samples: int, seconds: float | None, most: int | None) -> int:
        """This rank's share of so many samples, planned anew if it is time, or if the `seconds` of a sample are given.

        A rank that has just come may not be here: it may call this after its first step. Until then all take equal parts.
        """
        if self._fabric.size == 1:
            return samples
        self._follow_present()
        if self._members_just_came():
            return self._equal_part(samples, most)
        if seconds is None:
            mine = self._planned[self._worker.rank] if self._planned else 1
            if not self._watch.stop(mine) and sum(self._planned) == samples:
                self._watch.start()
                return mine
            seconds = self._watch.seconds()
        if not self._plan(samples, seconds, most):
            return self._equal_part(samples, most)
        self._watch.start()
        return self._planned[self._worker.rank]

    def _plan(self, samples: int, seconds: float, most: int | None) -> bool:
        """Plan with all ranks, and again if one is lost meanwhile; False if one has come."""
        while (found := self._attempt(samples, seconds, most)) is None:
            anew = self._follow_present()
            if self._members_just_came():
                return False
            if anew:
                self._watch.stop(1)  # this call is the first one since then
        self._planned = found
        return True

    def _attempt(self, samples: int, seconds: float, most: int | None) -> list[int] | None:
        """Plan with those who are there now; None if that has changed."""
        began = self._fabric.generation
        program = share_out(self._worker, samples, seconds, most, self._planned)
        planning = self._worker.jointly(up_to_a_change(program, lambda: self._fabric.generation == began))
        try:
            found = self._fabric.run(planning, "comm.share", self._worker.step - 1)
        except MembersChanged:
            return None
        except PeerError as failure:
            outlive(self._worker, self._fabric, failure)
            return None
        return found if self._fabric.generation == began else None

    def _equal_part(self, samples: int, most: int | None) -> int:
        part = max(samples // self._worker.size + (self._worker.rank < samples % self._worker.size), 1)
        return part if most is None else min(part, most)

    def _follow_present(self) -> bool:
        """Plan anew, at equal calls from now on, if ranks were lost or have come since the last plan."""
        changed = self._among != self._worker.ranks.present
        if changed:
            self._begin_anew()
        return changed

    def _begin_anew(self) -> None:
        self._planned, self._among = list[int](), self._worker.ranks.present
        self._watch = Stopwatch(self._worker, self._fabric.ledger)


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
    yield from worker.rest()  # who counts its own steps is perhaps in a round that waits for its quorum
    try:
        seconds, most = _slowest_of_a_replica(worker.replica, samples, seconds, most)
        check(samples, seconds, most, worker.size)
        refuse_weights(worker)
    except MembersChanged:
        raise
    except GossamerError as error:
        refusal = error
    yield from agree(refusal, worker.device)
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
