"""A rank that is missed on NCCL: our error, with a place, before NCCL's watchdog ends the process; and what becomes of the group."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.fabrics import streams
from tests.fabrics.streams import GPU, Event
from tests.gang import Gang
from tests.marked import SLACK

from gossamer.core.verbs import Compute, Program
from gossamer.fabrics.torch import nccl
from gossamer.fabrics.torch.fabric import TorchFabric

pytestmark = pytest.mark.gang

AMPLE = 30.0  # nobody may wait for it


class Group:
    """Whoever waits for a peer is released when it is aborted, as kernels are."""

    def __init__(self, ranks: list[int], size: int, deadline: float, device: torch.device) -> None:
        self.asked, self.ended = (list(ranks), size, deadline, device), list[str]()
        made.append(self)

    def abort(self) -> None:
        Event.happens = True
        self.ended.append("aborted")

    def shutdown(self) -> None:
        self.ended.append("shut down")


made = list[Group]()


@contextmanager
def gpus() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        streams.install(patch)
        patch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
        patch.setattr(nccl, "new_group", Group)
        patch.setattr(nccl, "card_of", lambda device: "")
        made.clear()
        yield


def reduces(fails: bool) -> Program[None]:
    """What a reduction is to the host: it is there at once, and the GPU waits."""

    def enqueue() -> None:
        if fails:
            raise ValueError("the codec has a bug")

    yield Compute(enqueue, "encode")


def missed(rank: int, size: int, fails: bool) -> tuple[str, str, float, list[str]]:
    with gpus():
        fabric = TorchFabric(deadline=AMPLE if fails else 1.0, patience="alive" if fails else "work", device=GPU)
        Event.happens = False
        began, outcome = time.monotonic(), ("", "no error")
        try:
            if rank == 0 or fails:
                fabric.join(fabric.start(reduces(fails and rank == 1), "block.7", step=12))
        except Exception as error:
            outcome = type(error).__name__, str(error)
        seconds = time.monotonic() - began
        dist.barrier()  # who does not come stays away until the other one has given up
        Event.happens = True
        fabric.close()
        return *outcome, seconds, made[0].ended


def test_a_rank_that_does_not_come_is_named_and_the_group_aborted(gang2: Gang) -> None:
    (kind, text, seconds, ended), (_, nothing, _, other) = gang2.run(missed, False)
    assert (kind, nothing) == ("PeerError", "no error")
    assert "rank 0 of 2: step 12, 'block.7', Compute 'encode'" in text
    assert "Rank 1 is alive, and busy elsewhere" in text
    assert seconds < 1.0 + 2.0 + SLACK
    assert ended == ["aborted"]
    assert other == ["shut down"]


def test_one_ranks_error_reaches_the_others_whom_nccl_would_not_wake(gang2: Gang) -> None:
    zero, one = gang2.run(missed, True)
    assert one[:2] == ("ValueError", "the codec has a bug")
    assert zero[0] == "PeerError"
    assert "ValueError: the codec has a bug" in zero[1]
    assert zero[2] < AMPLE
    assert zero[3] == one[3] == ["aborted"]


def comes_and_goes(rank: int, size: int) -> list[tuple[list[int], int, float, str, list[str]]]:
    with gpus():
        for _ in range(2):
            fabric = TorchFabric(deadline=20, patience="work", device=GPU)
            fabric.open_lane("other")
            fabric.join(fabric.start(reduces(False)))
            fabric.close()
        return [(*g.asked[:3], str(g.asked[3]), g.ended) for g in made]


def test_every_communicator_that_was_made_is_destroyed(gang2: Gang) -> None:
    """Each attach left its communicators behind, with their memory on the GPU."""
    for groups in gang2.run(comes_and_goes):
        assert groups == [([0, 1], 2, 20.0, "cuda:3", ["shut down"])] * 4


def options_of(rank: int, size: int) -> tuple[float, list[int], bool, str, str]:
    """What torch is asked for, on a build without NCCL."""

    class Options:
        pass

    class Backend:
        Options: object

        def __init__(self, store: object, number: int, count: int, options: object) -> None:
            self.given, self.connected = (store, number, count, options), list[torch.device]()

        def eager_connect_single_device(self, device: torch.device) -> None:
            self.connected.append(device)

    Backend.Options = Options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "ProcessGroupNCCL", Backend, raising=False)
        groups = [nccl.new_group([0, 1], 2, 30.0, GPU) for _ in range(2)]
        assert all(g.connected == [GPU] and g.given[1:3] == (rank, 2) for g in groups)
        first, second = (g.given[3] for g in groups)
        return (
            first._timeout.total_seconds(),
            first.global_ranks_in_group,
            first.is_high_priority_stream,
            first.group_name,
            second.group_name,
        )


HANDLING, SLEEP = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
DUMP = "TORCH_NCCL_DUMP_ON_TIMEOUT"


def found_by_torch(rank: int, size: int, name: str, before: str | None) -> tuple[str | None, str | None]:
    """What torch finds when a group is made, and what the process has afterwards."""
    found = list[str | None]()

    def backend(*_: object) -> Any:
        found.append(os.environ.get(name))
        return SimpleNamespace(eager_connect_single_device=lambda device: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(name, raising=False)
        if before is not None:
            patch.setenv(name, before)
        backend.Options = SimpleNamespace
        patch.setattr(dist, "ProcessGroupNCCL", backend, raising=False)
        nccl.new_group([0, 1], 2, 30.0, GPU)
        return found[0], os.environ.get(name)


@pytest.mark.parametrize("before", [None, "1"])
def test_torch_does_not_end_the_process_when_nccl_notices_that_a_peer_is_gone(gang2: Gang, before: str | None) -> None:
    """Torch's default, and torchrun's: the user would see an abort in place of an error that names the rank."""
    assert gang2.run(found_by_torch, HANDLING, before) == [("0", before)] * 2


@pytest.mark.parametrize("before", [None, "15000"])
def test_torchs_watchdog_does_not_sleep_for_a_minute_after_each_collective_that_failed(
    gang2: Gang, before: str | None
) -> None:
    """It sleeps four times as long as this, and the group's destructor waits for it."""
    assert gang2.run(found_by_torch, SLEEP, before) == [("1", before)] * 2


def test_torch_does_not_end_the_process_some_minutes_after_a_failure_that_members_go_on_from(gang2: Gang) -> None:
    """A thread of the first group of a process would, after it has written a record of what failed."""
    assert gang2.run(found_by_torch, DUMP, None) == [("0", None)] * 2


def test_nccls_watchdog_waits_longer_than_we_do(gang2: Gang) -> None:
    zero, one = gang2.run(options_of)
    assert zero == one
    assert zero[:3] == (90.0, [0, 1], True)
    assert zero[3] != zero[4]
