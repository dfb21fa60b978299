"""Local steps by measured speed: a slow machine takes fewer of them in a round, so that all come to its end together."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor

from gossamer.core.bucket import State
from gossamer.core.constraints import Constraint, excludes
from gossamer.core.contracts import Policy
from gossamer.core.load_balance import local_steps
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.schedule import Schedule
from gossamer.core.step_phases import after_optimizer_step, until_optimizer_step
from gossamer.core.stream_events import StepTimer, copied_to, read_numbers
from gossamer.core.verbs import Handle, OptimizerStep, Program, all_gather, join, now, start
from gossamer.schedules.wrapping import Wrapping

Weighing = Literal["nova", "tokens", "equal"]
LAPS = "by_speed"  # what a device is on its way through; it is beside the steps, and in no checkpoint


@final
@part("by_speed", sample="by_speed(local_sgd(8))")
class BySpeed(Wrapping):
    """Rounds of `then`, in which each rank takes as many local steps as it has time for while the fastest takes all of them.

    H_i = H t / t_i on rank i, for the t_i seconds of its step and the t of the fastest rank's: whole numbers, one at least, and
    chosen so that nobody is waited for longer than a tenth of a round. D = sum_i w_i (a - x_i), and `weigh` says what w is, with
    p_i rank i's share of all data (`attach(weight=)`; 1/N where nothing is said) and M = sum_j p_j H_j:
    "nova"    w_i = p_i M / H_i: of each rank its mean step, M times. For small rates the optimum is that of sum p_i f_i.
    "tokens"  w_i = p_i H_i / M: that of sum p_i H_i^2 f_i, with the least noise where all f_i are alike.
    "equal"   w_i = p_i: that of sum p_i H_i f_i.
    Ranks of one speed take `then`'s steps, bit for bit. D is weighted before memory and codec, so any of them will do.

    Each rank times its steps, without the longest of a round, which may hold an evaluation; what it knows of earlier rounds
    counts as much. At the end of a round ranks tell each other, and change their plan where that brings a tenth more steps a
    second. All count one round as `every` steps: a rank that takes fewer counts over some, so loop `while comm.step < total`,
    and draw batches as you go. Between the ends of rounds ranks are at steps of their own; save and judge at the ends,
    `if comm.ends_round`.

    Use: machines of unlike speed, which stay so. "tokens" where data are shuffled together.

    Not for: machines that are slow now and then, which `quorum_rounds` does not wait for. Nor loops that end after a
    number of batches of their own.

    Wire: what `then` sends, and 24 bytes a rank and round.

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
            f"by_speed: {self.then} has no rounds that ranks could go through in steps of their own; use local_sgd(...) or "
            "slowmo(...) without inner",
        )

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        learned = "{memory} under {schedule}: what ranks count changes with their speed, and it has learned the mean of before; "
        return (
            *self.then.constraints,
            excludes("control", because="{controller} under {schedule}: it goes by rounds of equal steps; drop it"),
            excludes(
                "votes",
                because="{exchange} under {schedule}: what is multiplied has the same vote as before; use sign() with error_feedback()",
            ),
            *([] if self.weigh == "equal" else [excludes("remembers all", because=learned + "use error_feedback()")]),
        )

    @property
    def skips_steps(self) -> bool:
        return True

    @property
    def prelude(self) -> int:
        return self.then.prelude

    def policy(self, key: str) -> Policy:
        return "drop" if key == "pace" else self.then.policy(key)

    def ends_round(self, step: int) -> bool:
        return self.then.ends_round(step)

    def is_synced(self, step: int) -> bool:
        return self.then.is_synced(step)

    # -- a step ----------------------------------------------------------------------------------------------------------

    def begin(self, loop: Loop) -> Program[None]:
        if LAPS not in loop.live:
            loop.live[LAPS] = [StepTimer(loop.places[0].device, (yield from now()))]

    def step(self, loop: Loop) -> Program[None]:
        state, every = loop.states[0], self.then.period
        pace = Pace.of(state, every)
        by_speed = (loop.step - 1) // every * every >= self.then.prelude
        if by_speed:
            loop.count_on(pace.number(loop.step, every))
        steps = self.then.step(loop.counting(pace.counts if by_speed else 1.0))
        yield from until_optimizer_step(steps)
        descended = yield OptimizerStep()
        laps = _ended(loop.live, (yield from now()))
        pace = _timed(pace, laps)
        tells = loop.size > 1 and loop.step % every == 0
        told = (yield from self._tell(loop, pace)) if tells else None
        yield from after_optimizer_step(steps, descended)
        if told is not None:
            pace = self._plan(loop, pace, (yield from join(told)))
        state["pace"] = pace.kept()
        laps.append(StepTimer(loop.places[0].device, (yield from now())))  # what was waited for is no computing

    def _tell(self, loop: Loop, pace: "Pace") -> Program[Handle[list[Tensor]]]:
        """Start telling all ranks how fast this one is; it travels with the round's average."""
        mine = torch.tensor([pace.known(), loop.weight, pace.steps], dtype=torch.float64)
        wire = copied_to(mine, loop.places[0].device).view(torch.uint8)
        return (yield from start(all_gather(wire), "pace", loop.step))

    def _plan(self, loop: Loop, pace: "Pace", answers: Sequence[Tensor]) -> "Pace":
        """The next round's; the average has landed, so that the host waits for its device no more."""
        told = torch.tensor(read_numbers(*(a.clone().view(torch.float64) for a in answers)), dtype=torch.float64)
        seconds, weights, before = told.view(-1, 3).t().tolist()
        steps = local_steps(self.then.period, seconds, [int(n) for n in before])
        own, mean = steps[loop.rank], sum(w * n for w, n in zip(weights, steps, strict=True)) / loop.size
        counts = {"nova": mean / own, "tokens": own / mean, "equal": 1.0}[self.weigh] if len(set(steps)) > 1 else 1.0
        return Pace(float(own), counts, pace.known())


def _ended(live: dict[str, Any], time: float) -> list[StepTimer]:
    """The laps that have not been looked at, of which the last ends now; none where this rank's first was not seen to begin."""
    laps: list[StepTimer] = live.setdefault(LAPS, [])
    if laps:
        laps[-1].end(time)
    return laps


def _timed(pace: "Pace", laps: list[StepTimer]) -> "Pace":
    """What laps that are over have told; a device may still be on its way through the others."""
    while laps and (seconds := laps[0].seconds) is not None:
        pace = pace.timed(seconds)
        laps.pop(0)
    return pace


class Pace(NamedTuple):
    """What a rank knows of its speed, and what follows from that for the round."""

    steps: float  # that it takes in this round
    counts: float  # what its progress counts then, besides what its data weigh
    seconds: float = 0.0  # of a step in earlier rounds; 0 where none was timed
    spent: float = 0.0  # in this round's steps that were timed
    longest: float = 0.0  # of them
    timings: float = 0.0  # how many they are

    @staticmethod
    def of(state: State, every: int) -> "Pace":
        kept = state.get("pace")
        return Pace(float(every), 1.0) if kept is None else Pace(*kept.cpu().clone().view(torch.float64).tolist())

    def kept(self) -> Tensor:
        return torch.tensor(self, dtype=torch.float64).view(torch.uint8)

    def number(self, step: int, every: int) -> int:
        """Of the step that comes after the one before `step`: the round's numbers are spread over this rank's steps."""
        done, steps = (step - 1) % every, int(self.steps)
        nth = done * steps // every + 1
        return step - 1 - done + -(-nth * every // steps)

    def timed(self, seconds: float) -> "Pace":
        """A step took so long; on a clock that stands still, nobody knows."""
        if seconds <= 0:
            return self
        return self._replace(spent=self.spent + seconds, longest=max(self.longest, seconds), timings=self.timings + 1)

    def known(self) -> float:
        """Seconds of a step."""
        if not self.timings:
            return self.seconds
        one = self.timings == 1
        here = self.spent if one else (self.spent - self.longest) / (self.timings - 1)
        return (self.seconds + here) / 2 if self.seconds else here
