"""Taking leave: no rank fails because another one has finished before it."""

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

from gossamer.fabrics.shared_store import SharedStore, poll
from gossamer.fabrics.stuck import let_go
from gossamer.fabrics.tickets import keys_of

_hosted = list[tuple[SharedStore, float]]()  # stores of fabrics that this process has closed, and their deadlines
_staying = 0  # the process that will stay; a forked one is another


def hosts_the_store() -> bool:
    """Whether the store goes when this process ends: that of rank 0, unless a torchrun agent keeps it."""
    return dist.get_rank() == 0 and has_store_host()


def has_store_host() -> bool:
    """Whether a rank's process hosts the store, and so goes last."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def without_failure() -> bool:
    """Whether no exception is on its way through this thread, nor has ended the program: nobody waits after a failure."""
    return sys.exc_info()[0] is None and getattr(sys, "last_value", None) is None


def at_exit(close: Callable[[], None]) -> "Finalize[None]":
    """Close a fabric at the end of this process, unless that is cancelled; and afterwards stay for the others.

    Not with `atexit`, which processes that multiprocessing has started never come to.
    """
    global _staying
    if _staying != os.getpid():
        _staying = os.getpid()
        _hosted.clear()
        Finalize(None, _stay, exitpriority=0)
    return Finalize(None, close, exitpriority=1)


def stay_for(store: SharedStore, deadline: float) -> None:
    """At the end of this process, wait until all ranks have left this store, or one has failed."""
    for earlier in list(_hosted):  # nothing waits for those that are over: what they left behind goes
        if earlier[0].flag_is_up("over"):
            earlier[0].take_down("over")
            _hosted.remove(earlier)
    _hosted.append((store, deadline))


def delete_farewells(store: SharedStore, left: Sequence[str], hosted: bool) -> None:
    """The last rank that leaves takes everybody's last words down, and what they say is `left`, so that no keys stay behind.

    A host that stays for the others is told by one key that they are through; it deletes that at its next fabric's end.
    """
    if left:
        store.raise_flag(f"left/{store.rank}", json.dumps(left))
    if store.raw.add("signed-off", 1) < store.size:
        return
    for name in _left(store):
        store.take_all_down(keys_of(name, store.size))
    for rank in range(store.size):
        store.take_down(f"pulse/{rank}")
        store.take_down(f"left/{rank}")
    store.take_down("signed-off")
    if hosted:  # the last word: the host may end as soon as it has read it, and the store with it
        store.raise_flag("over", "")


def _left(store: SharedStore) -> list[str]:
    """What all ranks have left behind."""
    there = [key for rank in range(store.size) if store.flag_is_up(key := f"left/{rank}")]
    found = dict[str, None]()
    for key, text in zip(there, store.read(there) if there else [], strict=True):
        try:
            said: Any = json.loads(text)
            found |= {str(name): None for name in said}
        except (ValueError, TypeError, RecursionError):
            raise store.malformed(key, text) from None
    return [*found]


def _all_have_left(store: SharedStore) -> bool:
    """Nothing is read here that whoever leaves last may be deleting."""
    return store.flag_is_up("over") or store.flag_is_up("broken")


def _stay() -> None:
    hosted, began, never = list(_hosted), time.monotonic(), threading.Event()
    _hosted.clear()
    for store, deadline in hosted if without_failure() else ():
        with suppress(RuntimeError):  # the store is gone: nobody waits for it any more
            poll(partial(_all_have_left, store), began + deadline - time.monotonic(), never)
    let_go()
