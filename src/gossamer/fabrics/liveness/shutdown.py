"""Ends ranks in the right order: no rank fails because another one has ended before it."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist

from gossamer.fabrics.liveness.store import SharedStore, let_go, poll
from gossamer.fabrics.torch.tickets import keys_of

_hosted = list[tuple[SharedStore, float]]()  # stores of fabrics that this process has closed, and their deadlines
_staying = 0  # id of the process that will stay; a forked process has another


def hosts_the_store() -> bool:
    """True if the store ends with this process: rank 0 hosts it, unless a torchrun agent does."""
    return dist.get_rank() == 0 and has_store_host()


def has_store_host() -> bool:
    """True if a rank's process hosts the store, and so must end last."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def without_failure() -> bool:
    """True if no exception is being handled or has ended the program; after a failure no rank waits for others."""
    return sys.exc_info()[0] is None and getattr(sys, "last_value", None) is None


def at_exit(close: Callable[[], None]) -> "Finalize[None]":
    """Register a fabric's `close` for the end of this process; after it, the process waits for the other ranks.

    It does not use `atexit`, which processes started by multiprocessing do not run.
    """
    global _staying
    if _staying != os.getpid():
        _staying = os.getpid()
        _hosted.clear()
        Finalize(None, _stay, exitpriority=0)
    return Finalize(None, close, exitpriority=1)


def stay_for(store: SharedStore, deadline: float) -> None:
    """Register a store: at its end, this process waits until all ranks have left the store, or one has failed."""
    for earlier in list(_hosted):  # all ranks have left this store: delete its last key
        if earlier[0].flag_is_up("over"):
            earlier[0].take_down("over")
            _hosted.remove(earlier)
    _hosted.append((store, deadline))


def delete_farewells(store: SharedStore, left: Sequence[str], hosted: bool) -> None:
    """Delete all remaining keys, if this is the last rank that leaves; else post the list of this rank's keys (`left`).

    If a rank hosts the store, one key tells it that all have left; it deletes that key when its next fabric ends.
    """
    if left:
        store.raise_flag(f"left/{store.rank}", json.dumps(left))
    if store.raw.add("signed-off", 1) < store.size:
        return
    for name in _left(store):
        store.take_down(*keys_of(name, store.size))
    for rank in range(store.size):
        store.take_down(f"pulse/{rank}", f"left/{rank}")
    store.take_down("signed-off")
    if hosted:  # must come last: the host and its store may end as soon as the host has read it
        store.raise_flag("over", "")


def _left(store: SharedStore) -> list[str]:
    """The keys that all ranks have listed for deletion."""
    there = [key for rank in range(store.size) if store.flag_is_up(key := f"left/{rank}")]
    named = [store.parsed(key, text, list[Any]) for key, text in zip(there, store.read(there), strict=True)]
    return [*dict.fromkeys(str(name) for names in named for name in names)]


def _all_have_left(store: SharedStore) -> bool:
    """True if all ranks have left or one has failed; reads no key that the last rank may be deleting."""
    return store.flag_is_up("over") or store.flag_is_up("broken")


def _stay() -> None:
    hosted, began, never = list(_hosted), time.monotonic(), threading.Event()
    _hosted.clear()
    for store, deadline in hosted if without_failure() else ():
        with suppress(RuntimeError):  # the store is gone: no rank needs it any more
            poll(partial(_all_have_left, store), began + deadline - time.monotonic(), never)
    let_go()
