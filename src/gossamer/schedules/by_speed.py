"""Local steps by measured speed: a slow rank takes fewer steps per round, so that all ranks end it together."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor

from gossamer.core.bucket import State
from gossamer.core.constraints import Constraint, excludes
from gossamer.core.contracts import Policy
from gossamer.core.load_balance import local_steps
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.schedule import Schedule, Shape
from gossamer.core.step_phases import after_optimizer_step, until_optimizer_step
from gossamer.core.stream_events import StepTimer, copied_to, read_numbers
from gossamer.core.verbs import Handle, OptimizerStep, Program, all_gather, join, now, start
from gossamer.schedules.wrapping import Wrapping

Weighing = Literal["nova", "tokens", "equal"]
LAPS = "by_speed"  # key of the step timers in `loop.live`; not saved in checkpoints


@final
@part("by_speed", sample="by_speed(local_sgd(8))")
class BySpeed(Wrapping):
    """Runs rounds of `then` in which a slow rank takes fewer local steps, in proportion to its measured speed.

    H_i = H t / t_i steps on rank i, whose step takes t_i seconds; t is that of the fastest rank. H_i is a whole number, at least
    1, chosen so that no wait is longer than a tenth of a round. D = sum_i w_i (a - x_i), and `weigh` selects w, with
    p_i rank i's share of all data (`attach(weight=)`; 1/N by default) and M = sum_j p_j H_j:
    "nova"    w_i = p_i M / H_i: each rank's mean step, times M. For small rates the optimum is that of sum p_i f_i.
    "tokens"  w_i = p_i H_i / M: that of sum p_i H_i^2 f_i, with the least noise where all f_i are alike.
    "equal"   w_i = p_i: that of sum p_i H_i f_i.
    If all ranks have equal speed, results equal those of `then`, bit for bit. D is weighted before memory and codec.

    Each rank times its steps, except the longest of a round, which may hold an evaluation, and averages this with its estimate
    from earlier rounds. At the end of a round ranks exchange their times, and change H_i if that gives a tenth more steps per
    second. Every rank counts a round as `every` steps; a rank that takes fewer skips step numbers. So loop
    `while comm.step < total`, and draw batches as you go. Within a round ranks are at different steps; save and evaluate at
    the end of a round, `if comm.ends_round`.

    Use: machines whose speeds differ and stay the same. Choose "tokens" if all ranks draw from the same shuffled data.

    Not for: machines that are slow now and then (use `quorum_rounds`, which does not wait for them); loops that end after a
    fixed number of batches.

    Wire: the bytes of `then`, and 24 bytes per rank and round.

    >>> from gossamer.schedules import LocalSGD
    >>> BySpeed(LocalSGD(16))
    by_speed(local_sgd(16))

    Paper: Wang, Liu, Liang, Joshi, Poor, Tackling the Objective Inconsistency Problem in Heterogeneous Federated
    Optimization, NeurIPS 2020.
    """

    then: Schedule
    weigh: Weighing = "nova"

    def __post_init__(self) -> None:
        require(
            "rounds" in self.then.traits,
            f"by_speed: {self.then} has no rounds of local steps, so ranks cannot take different numbers of them; use local_sgd(...) or "
            "slowmo(...) without inner",
        )

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        learned = "{memory} under {schedule}: the weights of ranks change with their speed, and it remembers the mean under the old weights; "
        return (
            *self.then.constraints,
            excludes(
                "control",
                because="{controller} under {schedule}: it assumes that all ranks take equally many steps per round; drop it",
            ),
            excludes(
                "votes",
                because="{exchange} under {schedule}: weighting a message does not change its vote; use sign() with error_feedback()",
            ),
            *([] if self.weigh == "equal" else [excludes("remembers all", because=learned + "use error_feedback()")]),
        )

    @cached_property
    def shape(self) -> Shape:
        return replace(super().shape, skips_steps=True)

    def policy(self, key: str) -> Policy:
        return "drop" if key == "pace" else self.then.policy(key)

    # -- a step ----------------------------------------------------------------------------------------------------------

    def begin(self, loop: Loop) -> Program[None]:
        if LAPS not in loop.live:
            loop.live[LAPS] = [StepTimer(loop.buckets[0].device, (yield from now()))]

    def step(self, loop: Loop) -> Program[None]:
        state, every = loop.states[0], self.then.shape.period
        pace = Pace.of(state, every)
        by_speed = (loop.step - 1) // every * every >= self.then.shape.prelude
        if by_speed:
            loop.step = pace.number(loop.step, every)
        steps = self.then.step(loop.counting(pace.counts if by_speed else 1.0))
        yield from until_optimizer_step(steps)
        stepped = yield OptimizerStep()
        laps = _ended(loop.live, (yield from now()))
        pace = _timed(pace, laps)
        sends = loop.ranks.size > 1 and loop.step % every == 0
        handle = (yield from self._tell(loop, pace)) if sends else None
        yield from after_optimizer_step(steps, stepped)
        if handle is not None:
            pace = self._plan(loop, pace, (yield from join(handle)))
        state["pace"] = pace.kept()
        laps.append(StepTimer(loop.buckets[0].device, (yield from now())))  # waiting is not computing

    def _tell(self, loop: Loop, pace: "Pace") -> Program[Handle[list[Tensor]]]:
        """Start sending this rank's speed to all ranks, at the same time as the round's average."""
        mine = torch.tensor([pace.known(), loop.ranks.weight, pace.steps], dtype=torch.float64)
        wire = copied_to(mine, loop.buckets[0].device).view(torch.uint8)
        return (yield from start(all_gather(wire), "pace", loop.step))

    def _plan(self, loop: Loop, pace: "Pace", answers: Sequence[Tensor]) -> "Pace":
        """Return the pace of the next round. The average has arrived, so reading `answers` does not block on the device."""
        table = torch.tensor(read_numbers(*(a.clone().view(torch.float64) for a in answers)), dtype=torch.float64)
        seconds, weights, before = table.view(-1, 3).t().tolist()
        steps = local_steps(self.then.shape.period, seconds, [int(n) for n in before])
        own, mean = steps[loop.ranks.rank], sum(w * n for w, n in zip(weights, steps, strict=True)) / loop.ranks.size
        counts = {"nova": mean / own, "tokens": own / mean, "equal": 1.0}[self.weigh] if len(set(steps)) > 1 else 1.0
        return Pace(float(own), counts, pace.known())


def _ended(live: dict[str, Any], time: float) -> list[StepTimer]:
    """End the running step timer; returns all timers not read yet, or none if the first step's start was not seen."""
    laps: list[StepTimer] = live.setdefault(LAPS, [])
    if laps:
        laps[-1].end(time)
    return laps


def _timed(pace: "Pace", laps: list[StepTimer]) -> "Pace":
    """Add the times of finished timers to `pace`; timers that the device has not reached are left."""
    while laps and (seconds := laps[0].seconds) is not None:
        pace = pace.timed(seconds)
        laps.pop(0)
    return pace


class Pace(NamedTuple):
    """A rank's measured speed, and its number of steps and weight in this round."""

    steps: float  # taken by this rank in this round
    counts: float  # the weight of its progress, besides the weight of its data
    seconds: float = 0.0  # per step in earlier rounds; 0 if no step was timed
    spent: float = 0.0  # seconds, sum over the timed steps of this round
    longest: float = 0.0  # seconds, the longest of them
    timings: float = 0.0  # number of them

    @staticmethod
    def of(state: State, every: int) -> "Pace":
        kept = state.get("pace")
        return Pace(float(every), 1.0) if kept is None else Pace(*kept.cpu().clone().view(torch.float64).tolist())

    def kept(self) -> Tensor:
        return torch.tensor(self, dtype=torch.float64).view(torch.uint8)

    def number(self, step: int, every: int) -> int:
        """Return the number of the step after `step - 1`: this rank's steps are spread over the round's numbers."""
        done, steps = (step - 1) % every, int(self.steps)
        nth = done * steps // every + 1
        return step - 1 - done + -(-nth * every // steps)

    def timed(self, seconds: float) -> "Pace":
        """Add a step's time; a clock that did not advance adds nothing."""
        if seconds <= 0:
            return self
        return self._replace(spent=self.spent + seconds, longest=max(self.longest, seconds), timings=self.timings + 1)

    def known(self) -> float:
        """Return the estimated seconds per step; 0 if unknown."""
        if not self.timings:
            return self.seconds
        one = self.timings == 1
        here = self.spent if one else (self.spent - self.longest) / (self.timings - 1)
        return (self.seconds + here) / 2 if self.seconds else here
