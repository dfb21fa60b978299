"""What reaches NCCL, and when, on a group that only writes it down. (tests/gpu has one that answers.)"""

import time
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.core.verbs import AllReduce, AllToAll, Receive, Send
from gossamer.fabrics.torch import nccl
from gossamer.fabrics.torch.nccl import Nccl


class Work:
    def wait(self) -> bool:
        return True


class Group:
    """Rank 0 of 3; what comes is a row of the sender's number."""

    def __init__(self, stuck: bool = False) -> None:
        self.said, self.stuck = list[str](), stuck

    def allreduce(self, tensors: list[Tensor], options: Any) -> Work:
        self.said.append(f"allreduce {tensors[0].numel()}")
        return Work()

    def alltoall_base(self, out: Tensor, wire: Tensor, back: list[int], there: list[int]) -> Work:
        self.said.append(f"alltoall {there} {back}")
        return Work()

    def _start_coalescing(self) -> None:
        self.said.append("[")

    def send(self, tensors: list[Tensor], to: int, tag: int) -> None:
        assert tensors[0].is_contiguous()
        self.said.append(f"send {tensors[0].numel()} to {to}")

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> None:
        tensors[0].fill_(source)
        self.said.append(f"recv {tensors[0].numel()} from {source}")

    def _end_coalescing(self) -> Work:
        self.said.append("]")
        return Work()

    def abort(self) -> None:
        self.said.append("abort")

    def shutdown(self) -> None:
        self.said.append("shutdown")
        if self.stuck:
            time.sleep(2.0)


def connection(stuck: bool = False) -> tuple[Nccl, Group]:
    group = Group(stuck)
    return Nccl(group, 0, 3, torch.device("cpu")), group


def wire(length: int) -> Tensor:
    return torch.zeros(length, dtype=torch.uint8)


def test_a_round_of_gossip_is_one_exchange() -> None:
    """A send by itself is a kernel that spins until its receiver comes, who may be spinning in a send of its own."""
    nccl, group = connection()
    nccl.answer(Send(1, wire(5), [(1, 7), (2, 5)]))
    nccl.answer(Send(2, wire(10)[::2]))
    assert group.said == []
    assert nccl.answer(Receive(1, 7)).tolist() == [1] * 7
    assert nccl.answer(Receive(2, 5)).tolist() == [2] * 5
    assert group.said == ["[", "send 5 to 1", "send 5 to 2", "recv 7 from 1", "recv 5 from 2", "]"]


def test_what_was_sent_goes_before_what_is_asked_next() -> None:
    nccl, group = connection()
    nccl.answer(Send(1, wire(5), [(2, 5)]))
    nccl.answer(AllReduce(torch.ones(4)))
    assert nccl.answer(Receive(2, 5)).tolist() == [2] * 5
    assert group.said == ["[", "send 5 to 1", "recv 5 from 2", "]", "allreduce 4"]


def test_a_rank_may_only_send_or_only_receive() -> None:
    nccl, group = connection()
    nccl.answer(Send(1, wire(5)))
    assert nccl.answer(Receive(2, 3)).tolist() == [2] * 3
    assert group.said == ["[", "send 5 to 1", "]", "[", "recv 3 from 2", "]"]


def test_nothing_and_oneself_cross_no_network() -> None:
    nccl, group = connection()
    nccl.answer(Send(0, wire(5), [(0, 5), (1, 0)]))
    nccl.answer(Send(2, wire(0)))
    assert nccl.answer(Receive(0, 5)).numel() == 5
    assert nccl.answer(Receive(1, 0)).numel() == 0
    assert group.said == []


def test_another_length_than_was_awaited_is_an_error() -> None:
    nccl, _ = connection()
    nccl.answer(Send(1, wire(5), [(2, 5)]))
    with pytest.raises(ValueError, match="6 bytes from rank 2"):
        nccl.answer(Receive(2, 6))


def test_a_rank_with_nothing_to_say_takes_part_in_an_all_to_all() -> None:
    nccl, group = connection()
    nccl.answer(AllToAll([wire(2), wire(0), wire(0)], [2, 0, 0]))
    assert group.said == ["alltoall [0, 0, 0] [0, 0, 0]"]


def test_a_communicator_is_destroyed_in_peace_and_aborted_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_FAREWELL", 0.1)
    peaceful, failed, torn, waiting = connection(), connection(), connection(), connection(stuck=True)
    peaceful[0].hang_up(1.0)
    failed[0].hang_up(0.0)
    torn[0].tear()
    torn[0].hang_up(1.0)
    waiting[0].hang_up(1.0)
    assert [group.said for _, group in (peaceful, failed, torn)] == [["shutdown"], ["abort"], ["abort"]]
    assert waiting[1].said == ["shutdown", "abort"]
    peaceful[0].hang_up(1.0)
    assert peaceful[1].said == ["shutdown"]


def test_whoever_hangs_up_does_not_wait_for_the_groups_destructor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's joins the watchdog, which may sleep for minutes after NCCL has lost a peer."""
    monkeypatch.setattr(nccl, "_FAREWELL", 0.1)
    go_on, destroyed = Event(), Event()

    class Slow(Group):
        def __del__(self) -> None:
            go_on.wait(60.0)
            destroyed.set()

    def slow() -> Nccl:
        return Nccl(Slow(), 0, 3, torch.device("cpu"))

    torn, peaceful = slow(), slow()
    torn.tear()
    began = time.monotonic()
    torn.hang_up(1.0)
    peaceful.hang_up(1.0)
    assert time.monotonic() - began < 30.0
    assert not destroyed.is_set()
    go_on.set()
    assert destroyed.wait(30.0)
