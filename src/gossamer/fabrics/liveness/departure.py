"""Departure: members that were told to leave do so after one step of all; steps cost nothing while nobody is told.

Ranks of one generation agree through the store, in the threads of their heartbeats. Who is told says so. Each rank then writes the
first step after which it can stop for a moment: the one after the last at whose end it has asked. All do so after the latest.
"""

import threading
import time
from typing import final

from gossamer.fabrics.liveness.members import Generation, Members
from gossamer.fabrics.liveness.notice import OwnNotice
from gossamer.fabrics.liveness.store import SharedStore

_LOOK = 0.02  # seconds between two looks while a loop waits for the others' steps
_TOLD = "leaving/told"


@final
class Departure:
    """Finds the step after which those who were told to leave hand over what they owe.

    After a change of members the agreement begins anew: a rank that is lost meanwhile is not waited for.
    """

    def __init__(self, members: Members, notice: OwnNotice) -> None:
        self._members, self._notice = members, notice
        self._lock = threading.Lock()
        self._passed = -1  # the last step after which this rank went on
        self._epoch = members.epoch  # the generation that the two below are of
        self._own: int | None = None  # the first step after which this rank can stop
        self._last: int | None = None  # the step after which all do
        members.each_beat = self._look

    def is_due(self, step: int) -> bool:
        """True if ranks leave after this step; ask on all ranks after the same steps."""
        epoch = self._members.epoch
        with self._lock:
            self._follow(epoch)
            own = self._own
            if own is None or step < own:
                self._passed = step
                return False
        if self._wait(epoch) and self._last is not None and step >= self._last:
            return True
        self._passed = step
        return False

    def _wait(self, epoch: Generation) -> bool:
        """Wait until all have said a step; False if the generation has ended, or the store is lost, which others tell."""
        members = self._members
        while self._last is None:
            if members.is_called or members.lost is not None or members.epoch is not epoch:
                return False
            time.sleep(_LOOK)
        return True

    def _follow(self, epoch: Generation) -> None:
        if self._epoch is not epoch:
            self._epoch, self._own, self._last = epoch, None, None

    # -- in the thread of the heartbeat ------------------------------------------------------------------------------------

    def _look(self, seldom: bool) -> None:
        """Called after each beat; `seldom` about once a second, when it is asked whether others were told."""
        epoch = self._members.epoch
        with self._lock:
            self._follow(epoch)
            own, last = self._own, self._last
        if last is not None or self._members.rank not in epoch.ranks:
            return
        store = self._members.store.under(f"epoch/{epoch.number}")
        if own is None and not self._has_said(store, epoch, seldom):
            return
        keys = [f"leaving/{rank}" for rank in epoch.ranks]
        if store.are_there(keys):
            last = max(store.numbers(keys))
            with self._lock:
                if self._epoch is epoch:
                    self._last = last

    def _has_said(self, store: SharedStore, epoch: Generation, seldom: bool) -> bool:
        """Write this rank's step, if a rank was told; False if none was."""
        if self._notice.received is not None:
            store.raise_flag(_TOLD, str(self._notice.received))
        elif not seldom or not store.flag_is_up(_TOLD):
            return False
        with self._lock:
            if self._epoch is not epoch:
                return False
            self._own = own = self._passed + 1
        store.raise_flag(f"leaving/{self._members.rank}", str(own))
        return True
