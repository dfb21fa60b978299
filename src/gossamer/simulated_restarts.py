"""Simulates a run whose ranks are lost, leave or come, where the recipe cannot go on without them: all ranks start again, from the
newest checkpoint, as under torchrun, with those that are there.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.checkpoints import state
from gossamer.core.errors import CostError
from gossamer.costs.events import EventClock, Events
from gossamer.fabrics.ledger import Ledger
from gossamer.fabrics.sim import SimResult, TimeSpan, simulate
from gossamer.simulate import Backward, ClusterCosts, Trained, program
from gossamer.simulated_bodies import Replica, mean_losses


@dataclass(frozen=True)
class Restarts:
    """A checkpoint after so many steps, what saving takes, and the time from a change until training goes on."""

    every: int
    saving: float = 0.0
    seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise CostError(f"every must be at least 1 step, not {self.every}")
        if not 0 <= self.saving < inf or not 0 <= self.seconds < inf:
            raise CostError("saving and seconds must be 0 or more")


class Crew(NamedTuple):
    """The ranks that train between two restarts: replicas as they start, how each computes, and what it costs."""

    replicas: list[Replica]
    backward: Backward
    costs: ClusterCosts


class Restart(NamedTuple):
    """Ranks went or came at a moment; training goes on, after a number of steps, with those that are present."""

    clock: float
    resumed: float
    done: int  # steps that the checkpoint holds
    again: int  # steps beyond it, which are made again
    present: tuple[int, ...]


@dataclass
class RestartedRun:
    """A run with all its restarts. Steps that were made again count once in losses, and with their time and bytes in all else."""

    replicas: list[Replica]
    ledger: Ledger
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list[float])  # of each step, the mean over ranks
    moments: list[float] = field(default_factory=list[float])  # when each step has ended
    gradients: int = 0  # steps that count, summed over ranks
    restarts: list[Restart] = field(default_factory=list[Restart])
    spans: list[TimeSpan] = field(default_factory=list[TimeSpan])  # time lines; see `fabrics.sim`


def train(
    crew: Callable[[Sequence[int]], Crew], size: int, steps: int, events: Events, restarts: Restarts
) -> RestartedRun:
    """Train `steps` steps on up to `size` ranks, of which `events` take some away and bring some back.

    `crew` makes those that are given by their numbers, as processes that have just started: all with the same parameters, and
    with costs of a cluster of so many ranks. Who leaves with a notice ends the round that is under way, and a checkpoint is
    written before all start again. Who is lost takes the steps since the last checkpoint with it. In a world of another size every
    rank gets the mean of the saved models, and its memories by the policies of `gossamer.checkpoint`.
    """
    return _Restarted(crew, range(size), steps, EventClock(events), restarts).run()


class _Saved(NamedTuple):
    step: int
    models: list[dict[str, Any]]
    optimizers: list[dict[str, Any]]
    workers: list[dict[str, Any]]


@dataclass
class _Restarted:
    crew: Callable[[Sequence[int]], Crew]
    ranks: range
    steps: int
    events: EventClock
    restarts: Restarts
    clock: float = 0.0
    saved: _Saved | None = None

    def run(self) -> RestartedRun:
        out: RestartedRun | None = None
        done = 0
        while out is None or done < self.steps:
            present = self._wait_for_ranks()
            crew = self.crew(present)
            out = RestartedRun(crew.replicas, Ledger(per_node=crew.costs.links.per_node)) if out is None else out
            out.replicas = crew.replicas
            _restore(crew.replicas, self.saved)
            done = self._until_a_change(out, crew, self.events.of(present))
        out.seconds = self.clock
        return out

    def _wait_for_ranks(self) -> list[int]:
        while not (present := self.events.present(self.ranks, self.clock)):
            self.clock = self.events.next_loss(self.clock)
            if self.clock == inf:
                raise CostError("all ranks are lost and none comes back; give at least one of them 'back'")
        return present

    def _until_a_change(self, out: RestartedRun, crew: Crew, events: EventClock) -> int:
        """Train, with a checkpoint now and then, until all steps are made or a rank goes or comes; returns the steps that count."""
        period = crew.replicas[0].worker.recipe.schedule.shape.period
        every = ceil(self.restarts.every / period) * period
        done = 0 if self.saved is None else self.saved.step
        while done < self.steps:
            begun = self.clock
            found = _segment(crew, out.ledger, events, min(every, self.steps - done), begun, period)
            made, ended = _made(crew.replicas), max(found.clocks)
            out.spans += [span._replace(rank=events.places[span.rank]) for span in found.spans]
            notice = events.next_notice(begun)
            saving = self.restarts.saving if made < self.steps else 0.0
            if found.stopped or events.next_loss(begun) < ended + saving:
                self._start_again(out, events, events.next_loss(begun), done, made - done)
                return done
            _note(out, crew.replicas, found, done)
            self.clock, done = ended + saving, made
            self.saved = _save(crew.replicas) if done < self.steps else None
            if notice < self.clock and done < self.steps:  # also while the checkpoint was written
                self._start_again(out, events, self.clock, done, 0)
                return done
        return done

    def _start_again(self, out: RestartedRun, events: EventClock, clock: float, done: int, again: int) -> None:
        self.clock = clock + self.restarts.seconds
        out.restarts.append(Restart(clock, self.clock, done, again, tuple(events.present(self.ranks, self.clock))))


def _segment(crew: Crew, ledger: Ledger, events: EventClock, steps: int, begin: float, period: int) -> SimResult:
    """Train up to `steps` steps, and fewer where a rank says that it leaves or is lost."""
    costs = replace(crew.costs, links=replace(crew.costs.links, events=events))
    costs.require(len(crew.replicas))

    def goes_on(step: int, clock: float) -> bool:
        under_way = ceil(events.latest_step() / period) * period
        return clock <= events.next_notice(begin) or step <= under_way

    for replica in crew.replicas:
        replica.worker.record.listener = ledger.hear
    programs = [program(replica, crew.backward, steps, costs, goes_on) for replica in crew.replicas]
    return simulate(programs, costs.links, ledger, begin, partial(events.next_loss, begin))


def _made(replicas: Sequence[Replica]) -> int:
    """The steps that the furthest rank has made."""
    return max(replica.worker.step for replica in replicas) - 1


def _note(out: RestartedRun, replicas: Sequence[Replica], found: SimResult, done: int) -> None:
    """Note the losses and moments of steps that count."""
    for replica, clock in zip(replicas, found.clocks, strict=True):
        replica.clock = clock
    steps = _made(replicas) - done
    out.gradients += sum(len(replica.losses) for replica in replicas)
    out.losses += mean_losses(replicas)
    out.moments += Trained([*replicas], out.ledger, found.spans).moments(steps)
    for replica in replicas:
        replica.losses.clear()
        replica.steps.clear()
        replica.begins.clear()


def _save(replicas: Sequence[Replica]) -> _Saved:
    simulate([replica.worker.quiesce() for replica in replicas])
    return _Saved(
        _made(replicas),
        [deepcopy(replica.model.state_dict()) for replica in replicas],
        [deepcopy(replica.optimizer.state_dict()) for replica in replicas],
        [state.save(replica.worker) for replica in replicas],
    )


def _restore(replicas: Sequence[Replica], saved: _Saved | None) -> None:
    if saved is None:
        return
    same = len(replicas) == len(saved.models)
    public = {} if same else _mean(saved.models)
    for rank, replica in enumerate(replicas):
        replica.model.load_state_dict(saved.models[rank] if same else public)
        replica.optimizer.load_state_dict(deepcopy(saved.optimizers[rank % len(saved.optimizers)]))
        state.load(replica.worker, saved.workers[rank] if same else saved.workers)


def _mean(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of saved models; of what is no floating-point tensor, the first's."""
    out = dict[str, Any]()
    for name, first in models[0].items():
        floats = isinstance(first, Tensor) and first.is_floating_point()
        out[name] = torch.stack([m[name] for m in models]).mean(0) if floats else first
    return out
