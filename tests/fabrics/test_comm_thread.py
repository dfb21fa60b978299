"""A comm thread that is closed where ranks may be lost ends what it computes, and breaks off what waits for the network."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gossamer.core.errors import GossamerError
from gossamer.core.verbs import Program
from gossamer.fabrics.torch.comm_thread import CommThread, Task


class Gate:
    """A driver whose tasks wait at a gate: in the network if they are `asking`, else in a computation."""

    def __init__(self) -> None:
        self.asking, self.inside, self.open, self.torn = False, threading.Event(), threading.Event(), threading.Event()

    def drive(self, handle: Task, halt: threading.Event) -> str:
        self.inside.set()
        while not self.open.wait(0.01):
            if self.asking and self.torn.is_set():
                raise RuntimeError("connection closed")
        return "ended"

    def account(self, handle: Any, error: BaseException, inside: bool) -> BaseException:
        return error

    def doomed(self, handle: Any, words: Any) -> str:
        return ""

    def hang_up(self, patience: float = 0.0) -> None:
        pass


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open.set()
    made.torn.set()


def nothing() -> Program[None]:
    yield from ()


def two_tasks(gate: Gate) -> tuple[CommThread, Task, Task]:
    """A thread that is in the first of two tasks."""
    pulse: Any = None  # nobody waits for the tasks
    thread = CommThread("comm", gate, pulse, torch.device("cpu"))
    tasks = Task(nothing(), "first", 1, thread), Task(nothing(), "second", 2, thread)
    for task in tasks:
        thread.put(task)
    assert gate.inside.wait(300.0)
    return thread, *tasks


def closed(thread: CommThread, break_off: Callable[[], None] | None, meanwhile: Callable[[], object]) -> bool:
    later = threading.Timer(0.3, meanwhile)
    later.start()
    found = thread.close(0.5, break_off)
    later.join()
    return found


def test_what_computes_comes_to_its_end(gate: Gate) -> None:
    thread, first, second = two_tasks(gate)
    assert closed(thread, gate.torn.set, gate.open.set)
    assert (first.result, first.error) == ("ended", None)
    assert not gate.torn.is_set()
    assert isinstance(second.error, GossamerError)


def test_what_waits_for_the_network_is_broken_off(gate: Gate) -> None:
    gate.asking = True
    thread, first, second = two_tasks(gate)
    assert thread.close(0.5, gate.torn.set)
    assert gate.torn.is_set()
    assert first.failed()
    assert second.failed()


def test_without_connections_to_break_nothing_is_waited_for(gate: Gate) -> None:
    thread, first, second = two_tasks(gate)
    assert not thread.close(0.05)
    assert first.failed()
    assert second.failed()
