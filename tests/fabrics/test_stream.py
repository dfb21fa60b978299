"""A program's way to a lane's stream and back, without a GPU: what is asked of streams and events, and by whom."""

import threading
import time
from typing import Any

import pytest
import torch
from tests.fabrics import streams
from tests.fabrics.streams import GPU, Cuda, Event
from tests.marked import SLACK

from gossamer.core import verbs
from gossamer.core.errors import PeerError
from gossamer.core.verbs import Compute, Program
from gossamer.fabrics.torch.fabric import TorchFabric
from gossamer.fabrics.torch.timers import EventRequestTimer

NAP = 0.5  # seconds


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return streams.install(monkeypatch)


def where() -> Program[Any]:
    return (yield Compute(lambda: (threading.current_thread().name, torch.cuda.current_stream(GPU).device), "look"))


def naps() -> Program[Any]:
    return (yield Compute(lambda: time.sleep(NAP), "nap"))


def test_a_cpu_model_trains_in_a_process_that_has_touched_cuda(cuda: Cuda) -> None:
    """On Python 3.11 and 3.12 nothing started there: a generator's type was subscripted at run time."""
    fabric = TorchFabric()
    assert fabric.run(verbs.all_reduce(torch.ones(2))).tolist() == [1.0, 1.0]
    fabric.close()
    assert cuda.devices == []


def test_every_lane_stands_on_the_device_of_the_tensors(cuda: Cuda) -> None:
    """Without `torch.cuda.set_device` in the loop, lanes worked on GPU 0, ordered by nothing."""
    fabric = TorchFabric(device=GPU)
    fabric.open_lane("other")
    for _ in range(2):
        for lane in ("comm", "other"):
            assert fabric.join(fabric.start(where(), lane=lane)) == (f"gossamer-{lane}", GPU)
    fabric.close()
    assert cuda.devices == [("gossamer-comm", GPU), ("gossamer-other", GPU)]


def test_a_tensor_of_another_device_is_refused_with_its_device(cuda: Cuda) -> None:
    fabric = TorchFabric(device=GPU)
    with pytest.raises(ValueError, match="AllReduce of a tensor on cpu, but the comm thread takes tensors on cuda:3"):
        fabric.run(verbs.all_reduce(torch.ones(1)))
    fabric.close()


def test_what_a_gpu_never_does_is_an_error_with_a_place(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program ends when it is enqueued: no deadline struck, and NCCL's watchdog ended the process."""
    fabric = TorchFabric(device=GPU, deadline=1.0)
    monkeypatch.setattr(Event, "happens", False)
    began = time.monotonic()
    first, second = (fabric.start(where(), label, step=12) for label in ("block.7", "block.8"))
    while not (first.ended.is_set() and second.ended.is_set()):  # type: ignore[attr-defined]
        time.sleep(0.01)
    assert not first.done()
    with pytest.raises(
        PeerError, match=r"rank 0 of 1: step 12, 'block.7', Compute 'look'.*\(not done after 1 seconds\)"
    ):
        fabric.join(first)
    assert 1.0 <= time.monotonic() - began < 1.0 + SLACK
    monkeypatch.setattr(
        Event, "happens", True
    )  # as when the communicator has been aborted: what was cut short is no result
    for ticket in (first, second, fabric.start(where(), "block.9", step=12)):
        with pytest.raises(PeerError, match=r"'block\.7'"):
            fabric.join(ticket)
    fabric.close()


def test_a_gpu_that_is_late_is_waited_for(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = TorchFabric(device=GPU, deadline=20.0)
    monkeypatch.setattr(Event, "happens", False)
    ticket = fabric.start(where())
    threading.Timer(0.1, lambda: monkeypatch.setattr(Event, "happens", True)).start()
    assert fabric.join(ticket) == ("gossamer-comm", GPU)
    assert ticket.done()
    fabric.close()


def test_a_request_takes_as_long_as_it_does_on_the_gpu(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to enqueue it is nobody's business."""
    fabric = TorchFabric(device=GPU)
    before = fabric.ledger.requests
    monkeypatch.setattr(Event, "elapsed_time", lambda begin, end: 2500.0)
    meta = torch.ones(3)
    monkeypatch.setattr("gossamer.fabrics.torch.driver.refuse", lambda *_: None)
    fabric.run(verbs.all_reduce(meta))
    (entry,) = fabric.ledger.entries[before:]
    assert (entry.verb, entry.handed, entry.seconds) == ("AllReduce", 12, 2.5)
    fabric.close()


def test_a_loop_that_waits_for_the_network_stands_still(cuda: Cuda) -> None:
    """From when its stream has nothing left to do, not from when the host has seen the program's end: that gave 0 s."""
    fabric = TorchFabric(device=GPU)
    with fabric.standstill.counted():
        fabric.join(fabric.start(naps()))
    # At once: it may be the last wait. Who waits may come late, and be woken late.
    assert NAP / 5 < fabric.ledger.exposed_seconds < NAP + SLACK
    fabric.close()


def test_a_loop_stands_still_only_while_its_gpu_has_nothing_to_do(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the event at which its stream could have gone on and that at which it can; the host may wait for backward too."""
    gaps = iter([3000.0, -500.0])
    fabric = TorchFabric(device=GPU)
    fabric.join(fabric.start(where()))  # nobody counts this
    monkeypatch.setattr(Event, "elapsed_time", lambda begin, end: next(gaps))
    with fabric.standstill.counted():
        for _ in range(2):
            fabric.join(fabric.start(where()))
        monkeypatch.setattr(Event, "happens", False)
    with fabric.standstill.counted():
        assert fabric.ledger.exposed_seconds == 0
    monkeypatch.setattr(Event, "happens", True)
    with fabric.standstill.counted():
        assert fabric.ledger.exposed_seconds == 3.0
    fabric.close()


def test_requests_of_a_program_that_nobody_joins_are_timed_as_they_end(cuda: Cuda) -> None:
    """A rank that answers others as long as they train kept two events for each request, and its seconds were 0."""
    amended = list[int]()
    timer = EventRequestTimer(GPU, lambda place, seconds: amended.append(place))
    for place in range(100):
        timer.end(timer.begin(), lambda seconds, place=place: place)
    assert amended == [*range(99)]
