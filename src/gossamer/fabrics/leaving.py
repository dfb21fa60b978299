"""Taking leave: no rank fails because another one has finished before it."""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.util import Finalize

import torch.distributed as dist

from gossamer.fabrics.board import Board, poll

_hosted = list[tuple[Sequence[Board], float]]()  # boards of fabrics that this process has closed, and their deadlines
_staying = 0  # the process that will stay; a forked one is another


def hosts_the_store() -> bool:
    """Whether the store goes when this process ends: that of rank 0, unless a torchrun agent keeps it."""
    return dist.get_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def in_peace() -> bool:
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


def stay_for(boards: Sequence[Board], deadline: float) -> None:
    """At the end of this process, wait until all ranks have left these boards, or one has failed."""
    _hosted.append((boards, deadline))


def _all_have_left(boards: Sequence[Board]) -> bool:
    return any(b.flag_is_up("broken") for b in boards) or all(b.all_left() for b in boards)


def _stay() -> None:
    hosted, began, never = list(_hosted), time.monotonic(), threading.Event()
    _hosted.clear()
    for boards, deadline in hosted if in_peace() else ():
        poll(partial(_all_have_left, boards), began + deadline - time.monotonic(), never)
