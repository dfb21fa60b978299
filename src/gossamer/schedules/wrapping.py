"""A base class for schedules that wrap another schedule, `then`."""

from collections.abc import Mapping

from gossamer.core.contracts import Policy
from gossamer.core.loop import Loop
from gossamer.core.schedule import Schedule, Share


class Wrapping(Schedule):
    """A schedule that wraps another schedule, `then`, and inherits the properties that it does not change."""

    then: Schedule

    def policy(self, key: str) -> Policy:
        return self.then.policy(key)

    @property
    def skips_steps(self) -> bool:
        return self.then.skips_steps

    @property
    def counts_alike(self) -> bool:
        return self.then.counts_alike

    @property
    def works_alone(self) -> bool:
        return self.then.works_alone

    @property
    def follows_rate(self) -> bool:
        return self.then.follows_rate

    @property
    def period(self) -> int:
        return self.then.period

    def fragment_of(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, int]:
        return self.then.fragment_of(shapes)

    def consensus_share(self, loop: Loop) -> list[Share] | None:
        return self.then.consensus_share(loop)
