"""A quorum over rounds: local steps, and rounds that close with the first learners that have come so far."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, ClassVar, Literal, final

import torch

from gossamer.core.binding import Binding
from gossamer.core.constraints import Constraint, excludes
from gossamer.core.contracts import Policy
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice, LogRange, Range
from gossamer.core.schedule import Schedule
from gossamer.core.verbs import OptimizerStep, Program, all_reduce
from gossamer.schedules import fragments as pieces
from gossamer.schedules.async_worker import AsyncWorker
from gossamer.schedules.merging import Merge
from gossamer.schedules.round_closer import ClosingRule
from gossamer.schedules.rounds import OuterStep, remember_anchor
from gossamer.schedules.streaming import fragments_of

Weighing = Literal["tokens2/steps", "tokens", "equal"]


@final
@part("quorum_rounds", sample="quorum_rounds(8)")
class QuorumRounds(Schedule):
    """Local steps, and rounds that close with the first `quorum` learners; late ones stop nobody, and are merged later.

    D = sum_i w_i (a_i - x_i) / sum_i w_i over those who answered;  v = momentum v + D;  a -= rate (D + momentum v).
    Each rank counts steps of its own. The first with `every` of them opens a round; every other answers after the step that it
    is in, with at least `least` of its own. Once `quorum` have answered, the round is kept open for a part `grace` of the
    slack: `overlap` steps, less the time that the quorum took and the last round's average. What was agreed on lands
    `overlap` steps after a rank has answered, x_i = a + (x_i - what it offered), so no step is lost. A rank that answered
    too late lands on the new anchor with all it has learned since its own last one, x_i = a + (x_i - a_i), and that is
    merged when it next answers; with `late="drop"` it starts from the anchor again, as the paper has it.

    `weigh`: t^2 / s, by the samples t and steps s since a rank was merged last (the paper's; its steps where batches
    are equal); "tokens", t; "equal". `merge="radial"` averages each tensor's direction and length apart, so that a step is as
    long whatever the quorum is; tensors that fit `plain` are averaged as they are. `fragments` of the model, packed
    evenly, take turns, one every `every / fragments` steps.

    A rank waits for an average when its `overlap` is over, or, where the round closed without it, at the end of its next one:
    there it learns of others that stand still.

    With all ranks for a quorum, no overlap and "equal" weights it is `diloco` where nobody is late, bit for bit. Ranks wait for
    one another in `consensus`, `finish`, `state_dict` and `save`, and answer meanwhile.

    Use: across sites, on machines that are slow now and then or of unlike speed: nobody waits for the slowest, and
    nothing it learns is lost.

    With `gossamer.members()` ranks may die and come back: a round that one leaves open runs again without it.

    Not for: runs that must repeat themselves to the bit: who answers in time depends on time, but in the simulator.

    Wire: the exchange's bytes once per `every` steps from every rank (late ones send zeros), and 8 a rank and round; by way
    of the host and gloo, under NCCL too.

    >>> QuorumRounds(every=100, quorum=3)
    quorum_rounds(100, quorum=3)

    Paper: Douillard et al., Decoupled DiLoCo, arXiv 2604.21428, 2026.
    """

    lane: ClassVar[str] = "quorum"
    outlives: ClassVar[bool] = True
    serves: ClassVar[bool] = True
    """Ranks that rest ask one another while rounds of others travel, in no fixed order: NCCL would wait for ever."""

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

    def __post_init__(self) -> None:
        require(self.every >= 1, f"quorum_rounds: every must be at least 1 step, got {self.every}; 100 is usual")
        require(
            self.quorum >= 1,
            f"quorum_rounds: quorum must be at least 1, got {self.quorum}: of no learner there is no mean; 1 is usual",
        )
        pieces.refuse_slots("quorum_rounds", self.fragments, self.fragments, self.every)
        require(
            0 <= self.overlap <= self.slot,
            f"quorum_rounds: overlap={self.overlap} where a round begins every {self.slot} steps: one is on its way at a "
            f"time; use 0 to {self.slot}, or rounds of more steps",
        )
        require(
            0 <= self.grace <= 1,
            f"quorum_rounds: grace must lie in [0, 1], got {self.grace}: more than all of the slack would be waited for",
        )
        require(
            1 <= self.least <= self.every,
            f"quorum_rounds: least must lie between 1 and {self.every}, the steps of a round, got {self.least}",
        )
        require(
            0 <= self.momentum < 1, f"quorum_rounds: momentum must lie in [0, 1), got {self.momentum}; 0.9 is usual"
        )
        require(self.rate > 0, f"quorum_rounds: rate must be positive, got {self.rate}; 0 would freeze the model")

    @property
    def slot(self) -> int:
        """The steps from one fragment's round to the next one's."""
        return self.every // self.fragments

    @property
    def counts_alike(self) -> bool:
        return self.weigh == "equal"

    @property
    def is_async(self) -> bool:
        return True

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        return (
            excludes(
                "remembers all",
                because="{memory} under {schedule}: it keeps the mean of what all ranks have sent, and here the latest are left out; "
                "use error_feedback()",
            ),
            excludes(
                "control",
                because="{controller} under {schedule}: ranks count steps of their own, so that no decision finds them all at "
                "one; drop it, or use diloco",
            ),
        )

    def fits(self, binding: Binding) -> None:
        super().fits(binding)
        require(
            binding.trains_alone or self.quorum <= binding.size,
            f"quorum_rounds(quorum={self.quorum}) on {binding.size} ranks: so many will never answer; use at most {binding.size}",
        )

    @property
    def period(self) -> int:
        return self.every

    def policy(self, key: str) -> Policy:
        return "equal" if key in ("anchor", "velocity", "lr", "round") else "drop"

    def ends_round(self, step: int) -> bool:
        return step % self.every == 0

    def fragment_of(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, int]:
        of = pieces.balanced(shapes, self.fragments)
        pieces.refuse_empty(self, shapes, of, [f"the {p + 1}." for p in range(self.fragments)])
        return of

    # -- a step ----------------------------------------------------------------------------------------------------------

    def begin(self, loop: Loop) -> Program[None]:
        if loop.size > 1 and "learner" not in loop.live:
            remember_anchor(loop, loop.parameters)
            loop.live["learner"] = learner = AsyncWorker(loop, fragments_of(loop), self._rule(), self.lane)
            yield from learner.open()

    def step(self, loop: Loop) -> Program[None]:
        yield from self.begin(loop)  # where no forward pass was seen
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
        """All ranks come, and answer while they wait; then nobody opens a round any more, and what is open is settled."""
        if "learner" in loop.live:
            learner: AsyncWorker = loop.live["learner"]
            yield from learner.surviving(partial(self._come_together, loop))
        elif loop.size > 1:
            yield from self._come_together(loop)

    def outlive(self, loop: Loop, failure: Exception) -> Program[None]:
        if "learner" not in loop.live:
            raise failure
        learner: AsyncWorker = loop.live["learner"]
        yield from learner.outlive(failure)

    def _come_together(self, loop: Loop) -> Program[None]:
        yield from self.rest(loop)
        mine = float(loop.live["learner"].say()) if "learner" in loop.live else 0.0
        flag = torch.tensor([mine], dtype=torch.float64, device=loop.places[0].device)
        said = int((yield from all_reduce(flag, "max")))
        if said:
            yield from self.begin(loop)  # on a rank that has never trained
            learner: AsyncWorker = loop.live["learner"]
            yield from learner.settle(said)

    def _rule(self) -> ClosingRule:
        return ClosingRule(
            self.slot,
            self.quorum,
            self.least,
            self.overlap,
            self.grace,
            self.late == "keep",
            partial(_weight, self.weigh),
            Merge(self.merge == "radial", self.plain),
            OuterStep(self.momentum, self.rate, by_lr=False, nesterov=True),
        )


def _weight(weigh: Weighing, steps: int, tokens: float) -> float:
    if weigh == "equal":
        return 1.0
    return tokens if weigh == "tokens" else tokens * tokens / steps
