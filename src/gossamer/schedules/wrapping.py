"""A base class for schedules that wrap another schedule, `then`."""

from collections.abc import Mapping
from functools import cached_property

from torch import Tensor

from gossamer.core.constraints import those
from gossamer.core.contracts import Policy
from gossamer.core.loop import Loop
from gossamer.core.schedule import Schedule, Shape, Share
from gossamer.core.verbs import Program


class Wrapping(Schedule):
    """A schedule that wraps another schedule, `then`, and inherits what it does not change."""

    then: Schedule

    @cached_property
    def shape(self) -> Shape:
        """What it inherits of the other schedule's shape."""
        then = self.then.shape
        return Shape(
            period=then.period,
            prelude=then.prelude,
            syncs=then.syncs,
            skips_steps=then.skips_steps,
            works_alone=then.works_alone,
            counts_alike=then.counts_alike,
            evaluates_another=then.evaluates_another,
        )

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | (self.then.traits & those(rank_to_rank=True))

    @property
    def follows_rate(self) -> bool:
        return self.then.follows_rate

    def averages(self, step: int) -> bool:
        return self.then.averages(step)

    def ends_round(self, step: int) -> bool:
        return self.then.ends_round(step)

    def is_synced(self, step: int) -> bool:
        return self.then.is_synced(step)

    def policy(self, key: str) -> Policy:
        return self.then.policy(key)

    def fragment_of(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, int]:
        return self.then.fragment_of(shapes)

    def consensus_share(self, loop: Loop) -> list[Share] | None:
        return self.then.consensus_share(loop)

    def ready(self, loop: Loop, index: int, flat: Tensor) -> Program[None]:
        yield from self.then.ready(loop, index, flat)
