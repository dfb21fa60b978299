"""A node as a member: the ranks that one torchrun starts on a machine take a seat together, and leave it together."""

import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any, final

import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from gossamer.core.errors import GossamerError, PeerError
from gossamer.fabrics.liveness.seats import SeatClaim
from gossamer.fabrics.liveness.store import SharedStore, default_store, poll

_calls = itertools.count()  # of members() in this process; all ranks of a node call it equally often


@final
class NodeRanks:
    """The ranks of this node, and a store that they have for themselves; a process without torchrun is a node of one rank."""

    def __init__(self, local: int = 0, size: int = 1, store: SharedStore | None = None) -> None:
        self.local, self.size = local, size
        self._store, self._turns = store, 0

    @staticmethod
    def of_torchrun(local: int, size: int) -> "NodeRanks":
        """This process's node, one of `size` ranks, in the store of its torchrun."""
        if size == 1:
            return NodeRanks()
        raw = default_store() if dist.is_initialized() else next(rendezvous("env://"))[0]
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        part = PrefixStore(f"gossamer/node/{attempt}/{next(_calls)}", raw)
        return NodeRanks(local, size, SharedStore(part, local, size))

    def agreed(self, take: Callable[[], SeatClaim], until: float) -> SeatClaim:
        """The seat that the node's first rank takes when all are here; all ranks of the node call this equally often.

        Others count on all ranks of a seat, from when it is taken.
        """
        store = self._store
        if store is None:
            return take()
        turn, self._turns = self._turns, self._turns + 1
        key, here = f"claim/{turn}", [f"here/{turn}/{local}" for local in range(1, self.size)]
        if self.local:
            store.raise_flag(here[self.local - 1], "")
            return self._heard(store, key, until)
        try:
            _wait_for(store, here, until)
            claim = take()
        except GossamerError as refused:
            store.raise_flag(key, json.dumps({"refused": str(refused)}))
            raise
        store.raise_flag(key, json.dumps([*claim]))
        return claim

    def _heard(self, store: SharedStore, key: str, until: float) -> SeatClaim:
        if not poll(lambda: store.flag_is_up(key), until - time.monotonic(), threading.Event()):
            raise PeerError(
                f"local rank {self.local} waited for the first rank of its node, which has taken no seat: check the end of its log; "
                "all ranks of a node call attach"
            )
        (text,) = store.read([key])
        claim = store.parsed(key, text, _claim_or_refusal)
        if isinstance(claim, str):
            raise PeerError(f"the first rank of this node cannot join: {claim}")
        return claim


def _wait_for(store: SharedStore, here: list[str], until: float) -> None:
    if not poll(lambda: store.are_there(here), until - time.monotonic(), threading.Event()):
        missing = ", ".join(str(local) for local, key in enumerate(here, 1) if not store.flag_is_up(key))
        raise PeerError(
            f"the first rank of its node waited for local rank(s) {missing}, which have not come: check the ends "
            "of their logs; all ranks of a node call attach"
        )


def _claim_or_refusal(said: Any) -> SeatClaim | str | None:
    match said:
        case [int() as seat, int() as life]:
            return SeatClaim(seat, life)
        case {"refused": str() as why}:
            return why
        case _:
            return None
