"""Backup workers: a step ends when enough gradients have arrived, without waiting for the last ones."""

from functools import cached_property
from typing import Literal, final

from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.constraints import Constraint, excludes, those
from gossamer.core.errors import AttachError
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.schedule import Schedule, Shape
from gossamer.core.verbs import OptimizerStep, Program
from gossamer.schedules.quorum import Quorum, QuorumDeadline


@final
@part("backup_workers")
class BackupWorkers(Schedule):
    """Averages the first N of N + b gradients at every step; the b latest gradients are dropped.

    A rank whose gradient is ready takes a ticket for the step. The N-th ticket closes it; then all ranks enter one
    exchange of flag g, flag = 1 for the first N. A late rank takes part with zeros while it still computes, and later applies
    every update that it missed, in order, so all replicas stay bit-equal; it can see that its gradient was dropped.
    `backups=0` is synchronous SGD. N must be at least 2: with one gradient per step there is nothing to average.

    `grace` keeps a step open for all ranks until a deadline: the median of recent arrival times, plus `grace` times their
    median distance from it (4 to 10 are usual), once 20 arrivals have been seen. So nothing is dropped while no rank is
    late. With 0 the N-th ticket closes the step. After `limit` seconds without N gradients all ranks raise an error, or with
    on_exhausted="shrink" the step averages the gradients that have arrived. That is a smaller batch: `before_step` may read
    `comm.accepted` and reduce the learning rate.

    It hides slow computing. A dead process or a broken link is still an error, raised within the fabric's deadline.

    Use: when every machine is slow now and then.

    Not for: machines of equal speed; a machine that is always last, because its data would never be used.

    Wire: the exchange's bytes (late ranks send zeros), one store round trip, and 8 bytes per parameter group.

    >>> BackupWorkers(backups=2)
    backup_workers(backups=2)

    Paper: Chen, Pan, Monga, Bengio, Jozefowicz, Revisiting Distributed Synchronous SGD, 2016.
    """

    backups: int = 1
    grace: float = 0.0
    limit: float = 0.0
    on_exhausted: Literal["error", "shrink"] = "error"

    def __post_init__(self) -> None:
        require(self.backups >= 0, f"backup_workers: backups must be 0 or more, got {self.backups}")
        require(self.grace >= 0, f"backup_workers: grace must be 0 or more, got {self.grace}; 0 waits for no late rank")
        require(self.limit >= 0, f"backup_workers: limit must be 0 or more seconds, got {self.limit}; 0 is no limit")
        require(
            self.limit > 0 or self.on_exhausted == "error",
            "backup_workers: on_exhausted='shrink' needs a limit, the seconds after which a step takes fewer gradients; set limit",
        )

    @cached_property
    def shape(self) -> Shape:
        return Shape(averages_gradients=True, works_alone=True, lane="quorum")

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(whole=True, waits_for_few=True)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        return (
            excludes(
                "memory",
                because="{memory} under {schedule}: a dropped gradient's residual would be lost; drop the memory, "
                "and use an exchange that needs none, such as scatter(qsgd())",
            ),
            excludes(
                "singles out",
                because="{rules} under {schedule}: one ticket closes the whole step, for all parameters; drop the {rules}",
            ),
            excludes(
                "control",
                because="{controller} under {schedule}: late ranks would change the recipe at another step; drop it",
            ),
        )

    def fits(self, binding: Binding) -> None:
        if len(binding.layouts) != 1:
            raise AttachError(
                f"{self} closes a step with one ticket and one message, so it needs all parameters in one bucket; give them all the "
                "same dtype and the same device"
            )
        if binding.trains_alone:
            return
        size, wanted = binding.size, binding.size - self.backups
        ranks = f"{size} rank{'s' * (size > 1)} leave{'s' * (size == 1)}"
        what = (
            "no gradient to wait for" if wanted < 1 else "one gradient a step, and the others would be computed in vain"
        )
        require(
            wanted > 1 or (wanted == 1 and self.backups == 0),
            f"backup_workers(backups={self.backups}): {ranks} {what}; use at least {self.backups + 2} ranks, or every_step()",
        )

    def begin(self, loop: Loop) -> Program[None]:
        if "quorum" not in loop.live:
            patience = QuorumDeadline(loop.ranks.size - self.backups, self.grace, self.limit)
            loop.live["quorum"] = quorum = Quorum(loop, patience, self.on_exhausted == "shrink", self.shape.lane)
            yield from quorum.open()

    def ready(self, loop: Loop, index: int, flat: Tensor) -> Program[None]:
        yield from self.begin(loop)  # if the forward hook did not run
        yield from self._quorum(loop).offer(flat)

    def step(self, loop: Loop) -> Program[None]:
        if loop.ranks.size > 1:
            yield from self._catch_up(loop)
        else:
            yield from loop.averages.wait_gradients()
        yield OptimizerStep()

    def _catch_up(self, loop: Loop) -> Program[None]:
        """Take the update of this rank's step and of all later closed steps; leave the last for the optimizer."""
        quorum = self._quorum(loop)
        outcome = yield from quorum.take()
        if loop.ranks.rank not in outcome.accepted:
            loop.record.dropped(loop.step)
        while quorum.is_late():
            yield OptimizerStep(outcome.missed)
            loop.step += 1
            outcome = yield from quorum.take()
        loop.optimizer.give([outcome.mean], outcome.fine, outcome.rates)

    def _quorum(self, loop: Loop) -> Quorum:
        return loop.live["quorum"]
