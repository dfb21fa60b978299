"""Reunion: how the members that are present meet again after one was lost or has come, in the midst of whatever they did."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gossamer.core.errors import GossamerError, PeerError
from gossamer.core.verbs import MembersChanged, MembersLeave, Program
from gossamer.fabrics.liveness.heartbeat import ranks as named
from gossamer.fabrics.torch.comm_thread import Task
from gossamer.fabrics.torch.last_collective import LastCollective, level

if TYPE_CHECKING:
    from gossamer.fabrics.torch.fabric import TorchFabric


class Reunion:
    """Runs where a joined task has failed: regroups, brings all ranks to the same collective, and lets them `meet`.

    A task that other ranks have completed is completed here too, so its program goes on as if nothing had happened. Any other
    raises MembersChanged: what was under way is lost, and the ranks have met already. Recipes that regroup by requests of
    their own leave `meet` unset.
    """

    def __init__(self, fabric: "TorchFabric") -> None:
        self._fabric = fabric
        self._meet: Callable[[], Program[None]] | None = None
        self._meets = False  # True while the ranks meet: then a failure is not handled, but ends the attempt
        self.is_behind = False  # True if others have completed a task that this rank could not complete
        self.resolved = True  # False if this rank has not completed the collective in which its generation ended

    def opens(self, meet: Callable[[], Program[None]]) -> None:
        """Handle failures from now on. `meet` is what the ranks say to one another then; all ranks call this together."""
        self._meet = meet
        for lane in self._fabric.session.lanes.values():
            lane.driver.last = self.listener()

    def listener(self) -> LastCollective | None:
        return None if self._meet is None else LastCollective(self.generation)

    def join_in(self) -> None:
        """Meet those that were at work before this rank came."""
        try:
            self._say(None, 0)
        except PeerError as failure:
            self._again(failure, None, 0)

    def admit(self) -> None:
        """Between two steps, since ranks have come, or were lost: meet again."""
        if self._meet is not None:
            self._again(PeerError("ranks have come"), *self._place())

    @property
    def generation(self) -> int:
        """The number of the generation in which this rank has met the others last."""
        return self._fabric.generation

    @property
    def is_open(self) -> bool:
        return self._meet is not None

    def catch_up(self) -> None:
        """Meet those that have met anew already, since the other ranks of this node have."""
        self._again(PeerError("the other ranks of this node have met again"), *self._place())

    def part_from(self, leavers: Sequence[int]) -> None:
        """Between two steps, on all who stay: go on without ranks that have said that they leave."""
        left = MembersLeave(f"{named([*leavers])} left, and the others could not go on", leavers)
        self._again(left, *self._place())

    def after(self, task: Task) -> None:
        """Handle a failure; returns if the task is complete now, or if its error is not one of lost ranks."""
        if self._meet is None or self._meets:
            return
        error = task.error
        if self._fabric.session.holds(task.lane):
            if not isinstance(error, PeerError):
                return
            self._again(error, *self._place())
        elif not isinstance(error, GossamerError):
            return
        if task.error is not None:
            raise MembersChanged(f"the members have changed: {error}") from error

    def _place(self) -> tuple[LastCollective | None, int]:
        return self._fabric.session.lanes["comm"].driver.last, len(self._fabric.present.ranks)

    def _again(self, failure: PeerError, last: LastCollective | None, ranks: int) -> None:
        life = self._fabric.present.life
        while True:
            self._fabric.regroup(failure)
            if self._fabric.present.life != life:  # counted as lost: what it was at is over
                last = None
            try:
                return self._say(last, ranks)
            except PeerError as again:
                failure = again

    def _say(self, last: LastCollective | None, ranks: int) -> None:
        assert self._meet is not None
        fabric, self._meets = self._fabric, True
        try:
            behind = fabric.run(level(last, ranks, fabric.present.place, fabric.device), "members")
            self.is_behind = self.is_behind if behind is None else behind
            self.resolved = last is None or last.is_resolved
            fabric.run(self._meet(), "members")
            self.is_behind = False
        finally:
            self._meets = False
