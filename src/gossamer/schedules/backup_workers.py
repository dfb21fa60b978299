"""Backup workers: the step ends when enough gradients are in, not when the last one is."""

from typing import ClassVar, Literal, final

from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.constraints import Constraint, excludes, those
from gossamer.core.errors import AttachError
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.schedule import Schedule
from gossamer.core.verbs import OptimizerStep, Program
from gossamer.schedules.quorum import Quorum, QuorumDeadline


@final
@part("backup_workers")
class BackupWorkers(Schedule):
    """Average the first N of N + b gradients; the b latest are dropped, and their workers are told.

    A rank whose gradient is ready claims a ticket for the step. The N-th ticket closes it; then all ranks enter one
    exchange of flag g, flag = 1 for the first N. A late rank takes part with zeros while it still computes, and applies
    every update it missed in order, so all replicas stay bit-equal. `backups=0` is synchronous SGD. N must be two at
    least: of one gradient a step there is no mean, and a rank alone would train as well.

    `grace` keeps a step open for all until a deadline that follows the ranks: the median of their last arrivals, and so many
    times their median distance from it (4 to 10 are usual), once 20 have been seen. So nothing is dropped where nobody is late; at 0 the N-th ticket
    closes it. After `limit` seconds without N gradients they are exhausted: that is an error on all ranks, or with
    on_exhausted="shrink" the step is made of those that are there, which are a smaller batch: `before_step` may look at
    `comm.accepted` and take a shorter step.

    It hides slow computing, not a dead process or a slow link: those are errors within the deadline.

    Use: where machines are slow now and then, each in its turn.

    Not for: machines that are all alike, nor one that is always last: its data is never learned.

    Wire: that of the exchange (late ranks send zeros), one store round trip, and 8 bytes a parameter group.

    >>> BackupWorkers(backups=2)
    backup_workers(backups=2)

    Paper: Chen, Pan, Monga, Bengio, Jozefowicz, Revisiting Distributed Synchronous SGD, 2016.
    """

    lane: ClassVar[str] = "quorum"

    backups: int = 1
    grace: float = 0.0
    limit: float = 0.0
    on_exhausted: Literal["error", "shrink"] = "error"

    def __post_init__(self) -> None:
        require(self.backups >= 0, f"backup_workers: backups must be 0 or more, got {self.backups}")
        require(
            self.grace >= 0, f"backup_workers: grace must be 0 or more, got {self.grace}; at 0 nobody is waited for"
        )
        require(
            self.limit >= 0, f"backup_workers: limit must be 0 or more seconds, got {self.limit}; at 0 there is none"
        )
        require(
            self.limit > 0 or self.on_exhausted == "error",
            "backup_workers: on_exhausted='shrink' needs a limit, the seconds after which fewer gradients will do",
        )

    @property
    def averages_gradients(self) -> bool:
        return True

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(whole=True, waits_for_few=True)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        return (
            excludes(
                "memory",
                because="{memory} under {schedule}: a dropped gradient's residual would be lost silently; drop the memory, "
                "and use an exchange that needs none, such as scatter(qsgd())",
            ),
            excludes(
                "singles out", because="{rules} under {schedule}: one ticket closes the whole step; drop the {rules}"
            ),
            excludes("control", because="{controller} under {schedule}: late ranks decide late"),
        )

    def fits(self, binding: Binding) -> None:
        if len(binding.layouts) != 1:
            raise AttachError(
                f"{self} closes a step with one ticket and one message, so all parameters must be of one precision and on one "
                "device"
            )
        if binding.trains_alone:
            return
        size, wanted = binding.size, binding.size - self.backups
        ranks = f"{size} rank{'s' * (size > 1)} leave{'s' * (size == 1)}"
        what = "nobody to wait for" if wanted < 1 else "one gradient a step, and the others are computed for nothing"
        require(
            wanted > 1 or (wanted == 1 and self.backups == 0),
            f"backup_workers(backups={self.backups}): {ranks} {what}; use at least {self.backups + 2} ranks, or every_step()",
        )

    def begin(self, loop: Loop) -> Program[None]:
        if "quorum" not in loop.live:
            patience = QuorumDeadline(loop.size - self.backups, self.grace, self.limit)
            loop.live["quorum"] = quorum = Quorum(loop, patience, self.on_exhausted == "shrink", self.lane)
            yield from quorum.open()

    def ready(self, loop: Loop, index: int, flat: Tensor) -> Program[None]:
        yield from self.begin(loop)  # where no forward pass was seen
        yield from self._quorum(loop).offer(flat)

    def step(self, loop: Loop) -> Program[None]:
        if loop.size > 1:
            yield from self._catch_up(loop)
        else:
            yield from loop.average_gradients()
        yield OptimizerStep()

    def _catch_up(self, loop: Loop) -> Program[None]:
        """Take the agreed update of my step, and of all that closed meanwhile; the last is left for the optimizer."""
        quorum = self._quorum(loop)
        outcome = yield from quorum.take()
        if loop.rank not in outcome.accepted:
            loop.drop(loop.step)
        while quorum.is_late():
            yield from loop.missed(outcome.missed)
            outcome = yield from quorum.take()
        loop.deliver(outcome.mean, outcome.fine, outcome.rates)

    def _quorum(self, loop: Loop) -> Quorum:
        return loop.live["quorum"]
