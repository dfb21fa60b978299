"""Quorum rounds (Decoupled DiLoCo): local steps, and rounds that close with the first ranks that answer."""

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Annotated, Literal, final

import torch
from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.constraints import Constraint, excludes
from gossamer.core.contracts import Policy
from gossamer.core.loop import BucketView, Loop
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice, LogRange, Range
from gossamer.core.schedule import Elastic, Schedule, Shape, Share
from gossamer.core.verbs import OptimizerStep, Program, all_reduce
from gossamer.schedules import fragments as pieces
from gossamer.schedules.async_worker import AsyncWorker
from gossamer.schedules.merging import DelayedNesterov, Merge
from gossamer.schedules.recovery import EQUAL
from gossamer.schedules.round_closer import ClosingRule
from gossamer.schedules.rounds import OuterStep, remember_anchor
from gossamer.schedules.streaming import fragments_of

Weighing = Literal["tokens2/steps", "tokens", "equal"]


@final
@part("quorum_rounds", sample="quorum_rounds(8)")
class QuorumRounds(Schedule, Elastic):
    """Takes local steps in rounds that close with the first `quorum` ranks; late ranks are merged in a later round.

    D = sum_i w_i (a_i - x_i) / sum_i w_i over the ranks that answered;  v = momentum v + D;  a -= rate (D + momentum v).
    Each rank counts its own steps. The first rank with `every` steps opens a round; every other rank answers after its current
    step, once it has taken at least `least` steps. When `quorum` ranks have answered, the round stays open for a part `grace`
    of the slack: the time of `overlap` steps, minus the time for the quorum and for the last round's average. A rank writes the
    new anchor `overlap` steps after its answer, x_i = a + (x_i - what it offered), so no step is lost. A rank that answered
    too late takes the new anchor with all its progress since its own last one, x_i = a + (x_i - a_i), and that progress is
    merged at its next answer; with `late="drop"` it starts again from the anchor, as in the paper.

    `weigh` selects w: "tokens2/steps" is t^2 / s, for t samples and s steps since the rank was last merged (as in the paper,
    and proportional to s if batches are equal), "tokens" is t, "equal" is 1. `merge="radial"` averages each tensor's direction
    and length separately, so that the length of a step does not depend on the quorum; tensors that match `plain` get the plain
    mean. The model is split into `fragments` of equal size, which take turns, one every `every / fragments` steps.

    A rank waits for an average when its `overlap` is over, or, if the round closed without it, at the end of its next round:
    there it finds out if other ranks are stuck.

    With `delayed=c` momentum is that of asynchronous DiLoCo (delayed Nesterov): every N-th arrival moves the velocity and takes
    it, each other one takes its own D / N and a part c of the old velocity, 0 <= c <= 1 / N. A round with k ranks counts as k
    arrivals. A rank then answers after `every` steps of its own, whatever rounds it missed, and with no fewer. The
    paper also gives slow ranks fewer steps, which `by_speed` does around schedules whose ranks meet.

    With quorum = N, no overlap and "equal" weights it equals `diloco` bit for bit if no rank is late. Ranks wait for each other
    in `consensus`, `finish`, `state_dict` and `save`, and still answer meanwhile. On one rank it is plain training; `diloco`
    takes its outer step there too.

    Use: across sites, on machines of different or changing speed: no rank waits for the slowest, and no progress of the
    slowest is lost.

    With `gossamer.members()` ranks may be lost and come back: an open round runs again without the lost rank.

    Not for: runs that must be reproducible bit for bit, since timing decides which ranks answer (the simulator is exact).

    Wire: the exchange's bytes once per `every` steps from every rank (late ranks send zeros), and 8 bytes per rank and round; always
    over the host with gloo, even if the process group uses NCCL. With `delayed` once per arrival instead, up
    to N times as often.

    >>> QuorumRounds(every=100, quorum=3)
    quorum_rounds(100, quorum=3)

    Papers: Douillard et al., Decoupled DiLoCo, arXiv 2604.21428, 2026; Liu et al., Asynchronous Local-SGD Training for Language
    Modeling, arXiv 2401.09135, 2024 (`delayed`).
    """

    every: Annotated[int, Choice(4, 8, 12, 24, 48)]
    quorum: int = 1
    overlap: int = 1
    grace: Annotated[float, Range(0.0, 1.0)] = 1.0
    rate: Annotated[float, LogRange(0.2, 1.0)] = 0.7
    momentum: Annotated[float, Range(0.0, 0.9)] = 0.9
    late: Literal["keep", "drop"] = "keep"
    weigh: Weighing = "tokens2/steps"
    merge: Literal["mean", "radial"] = "mean"
    plain: tuple[str, ...] = ("*emb*", "*head*")
    fragments: int = 1
    least: int = 1
    delayed: float | None = None

    def __post_init__(self) -> None:
        require(self.every >= 1, f"quorum_rounds: every must be at least 1 step, got {self.every}; 100 is usual")
        require(self.quorum >= 1, f"quorum_rounds: quorum must be at least 1 rank, got {self.quorum}; 1 is usual")
        pieces.refuse_slots("quorum_rounds", self.fragments, self.fragments, self.every)
        require(
            0 <= self.overlap <= self.slot,
            f"quorum_rounds: overlap={self.overlap} is more than the {self.slot} steps from one round to the next, and only one may be in "
            f"flight; use 0 to {self.slot}, or rounds of more steps",
        )
        require(
            0 <= self.grace <= 1,
            f"quorum_rounds: grace must lie in [0, 1], got {self.grace}; 1 waits for all of the slack",
        )
        require(
            1 <= self.least <= self.every,
            f"quorum_rounds: least must lie between 1 and {self.every}, the steps of a round, got {self.least}",
        )
        require(
            0 <= self.momentum < 1, f"quorum_rounds: momentum must lie in [0, 1), got {self.momentum}; 0.9 is usual"
        )
        require(self.rate > 0, f"quorum_rounds: rate must be positive, got {self.rate}; 0 would freeze the model")
        if self.delayed is not None:
            self._check_delayed(self.delayed)

    def _check_delayed(self, delayed: float) -> None:
        require(
            0 <= delayed <= 1,
            f"quorum_rounds: delayed must lie between 0 and 1 divided by the number of ranks, got {delayed}; 0 is usual",
        )
        require(
            self.least in (1, self.every),
            f"quorum_rounds: delayed={delayed} with least={self.least}: a rank answers after {self.every} steps of its own; leave "
            "least out",
        )
        require(
            self.fragments == 1,
            f"quorum_rounds: delayed={delayed} with {self.fragments} fragments: it counts arrivals of whole models; leave fragments out",
        )
        require(
            self.late == "keep",
            f"quorum_rounds: delayed={delayed} with late='drop': a rank that misses rounds would never answer; leave late out",
        )

    @property
    def slot(self) -> int:
        """Return the number of steps from one fragment's round to the next one's."""
        return self.every // self.fragments

    @cached_property
    def shape(self) -> Shape:
        # `serves`: resting ranks communicate while other rounds are in flight, in no fixed order, which would deadlock in NCCL.
        return Shape(period=self.every, is_async=True, counts_alike=self.weigh == "equal", lane="quorum", serves=True)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        return (
            excludes(
                "remembers all",
                because="{memory} under {schedule}: it remembers the mean over all ranks, and here late ranks are left out; "
                "use error_feedback()",
            ),
            excludes(
                "control",
                because="{controller} under {schedule}: ranks are at different steps, so they cannot change the recipe at the same "
                "one; drop it, or use diloco",
            ),
        )

    def fits(self, binding: Binding) -> None:
        super().fits(binding)
        require(
            binding.trains_alone or self.quorum <= binding.size,
            f"quorum_rounds(quorum={self.quorum}) on {binding.size} ranks: the quorum is larger than the number of ranks; use at most {binding.size}",
        )
        require(
            self.delayed is None or self.delayed <= 1 / binding.size,
            f"quorum_rounds(delayed={self.delayed}) on {binding.size} ranks: the ranks' parts of the velocity add up to more than 1; use at "
            f"most 1 / {binding.size}",
        )

    def policy(self, key: str) -> Policy:
        return "equal" if key in (*EQUAL, "lr", "round", "arrivals") else "drop"

    def fragment_of(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, int]:
        of = pieces.balanced(shapes, self.fragments)
        pieces.refuse_empty(self, shapes, of, [f"the {p + 1}." for p in range(self.fragments)])
        return of

    def consensus_share(self, loop: Loop) -> list[Share] | None:
        return Share.each(loop.live["learner"].landed()) if "learner" in loop.live else super().consensus_share(loop)

    # -- a step ----------------------------------------------------------------------------------------------------------

    def begin(self, loop: Loop) -> Program[None]:
        if "learner" in loop.live:
            loop.live["learner"].goes_on()
        elif _meets_others(loop):
            remember_anchor(loop, loop.parameters)
            loop.live["learner"] = learner = AsyncWorker(loop, fragments_of(loop), self._rule(), self.shape.lane)
            yield from learner.open()

    def step(self, loop: Loop) -> Program[None]:
        yield from self.begin(loop)  # if the forward hook did not run
        yield OptimizerStep()
        learner: AsyncWorker = loop.live["learner"]
        yield from learner.step_is_done()

    def rest(self, loop: Loop) -> Program[None]:
        if "learner" in loop.live:
            learner: AsyncWorker = loop.live["learner"]
            yield from learner.rest()

    def reopen(self, loop: Loop) -> Program[None]:
        if "learner" in loop.live:
            learner: AsyncWorker = loop.live["learner"]
            yield from learner.take_over()

    def quiesce(self, loop: Loop) -> Program[None]:
        """Settle all open rounds. All ranks must call it; they answer while they wait, and open no new round."""
        if "learner" in loop.live:
            learner: AsyncWorker = loop.live["learner"]
            yield from learner.surviving(partial(self._come_together, loop))
        elif _meets_others(loop):
            yield from self._come_together(loop)

    def outlive(self, loop: Loop, failure: Exception) -> Program[None]:
        if "learner" not in loop.live:
            raise failure
        learner: AsyncWorker = loop.live["learner"]
        yield from learner.outlive(failure)

    def depart(self, loop: Loop) -> Program[bool]:
        yield from self.begin(loop)
        learner: AsyncWorker = loop.live["learner"]
        yield from learner.depart()
        return learner.has_left

    def _come_together(self, loop: Loop) -> Program[None]:
        yield from self.rest(loop)
        mine = float(loop.live["learner"].say()) if "learner" in loop.live else 0.0
        flag = torch.tensor([mine], dtype=torch.float64, device=loop.buckets[0].device)
        largest = int((yield from all_reduce(flag, "max")))
        if largest:
            if "learner" not in loop.live:  # this rank has never trained
                yield from self.begin(loop)
            learner: AsyncWorker = loop.live["learner"]
            yield from learner.settle(largest)

    def _rule(self) -> ClosingRule:
        return ClosingRule(
            slot=self.slot,
            quorum=self.quorum,
            least=self.least if self.delayed is None else self.every,
            overlap=self.overlap,
            grace=self.grace,
            keeps=self.late == "keep",
            weigh=partial(_weight, self.weigh),
            merge=Merge(self.merge == "radial", self.plain),
            follow=self._follow,
            by_arrival=self.delayed is not None,
        )

    def _follow(self, bucket: BucketView, mean: Tensor, arrivals: int, size: int) -> None:
        """Move a bucket's anchor by the mean over `arrivals` of `size` ranks."""
        if self.delayed is None:
            OuterStep(self.momentum, self.rate, by_lr=False, nesterov=True).take(bucket, mean, 1.0)
        else:
            DelayedNesterov(self.momentum, self.rate, self.delayed).take(bucket, mean, arrivals, size)


def _meets_others(loop: Loop) -> bool:
    """True if there are other ranks, or some may come."""
    return loop.ranks.size > 1 or loop.ranks.present.may_change


def _weight(weigh: Weighing, steps: int, tokens: float) -> float:
    if weigh == "equal":
        return 1.0
    return tokens if weigh == "tokens" else tokens * tokens / steps
