"""The step at which members end, which one of them chooses: a test's own process may be late, and ranks make many steps meanwhile."""

from gossamer.fabrics.liveness.store import SharedStore
from gossamer.integrations import Communicator

AHEAD = 100  # steps, in which all others read it: each looks after every step


def end_with(store: SharedStore, present: int) -> None:
    """Let ranks choose their last step, once so many of them are present."""
    store.raise_flag("enough", str(present))


class LastStep:
    """Of one rank. The first rank of those that are present chooses for all: a multiple of `every`.

    Where nodes hold shards, a rank sees only those with its own shard. One shard alone may choose: ranks of the others
    pass None as their rank.
    """

    def __init__(self, comm: Communicator, store: SharedStore, rank: int | None, every: int = 1) -> None:
        self._comm, self._store, self._rank, self._every = comm, store, rank, every
        self._at: int | None = None

    def is_over(self) -> bool:
        if self._at is None and self._rank == self._comm.present[0] and self._are_enough():
            self._store.raise_flag("until", str((self._comm.step + AHEAD) // self._every * self._every))
        if self._at is None and self._store.flag_is_up("until"):
            self._at = int(self._store.read(["until"])[0])
        return self._at is not None and self._comm.step >= self._at

    def _are_enough(self) -> bool:
        if self._store.flag_is_up("until") or not self._store.flag_is_up("enough"):
            return False
        return len(self._comm.present) == int(self._store.read(["enough"])[0])
