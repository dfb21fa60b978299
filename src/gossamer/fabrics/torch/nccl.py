"""A connection over NCCL, between GPUs. Its calls queue kernels on a stream and do not wait for them."""

import os
import socket
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.core.errors import AttachError
from gossamer.core.verbs import AllGather, AllReduce, AllToAll, Receive, Send
from gossamer.core.wire import LazyWire, Read, send_order
from gossamer.fabrics.liveness.store import default_store
from gossamer.fabrics.torch.connection import Crossing, all_reduce, made, read_all

BOOT = Path("/proc/sys/kernel/random/boot_id")
GRACE = 60.0  # seconds that NCCL's watchdog, which may end the process, waits longer than gossamer
# Variables that torch reads when a group is created. 0 is NoHandling (pytorch#155916). The second one is a quarter of the time
# that the watchdog sleeps, with its locks held, for each collective that failed, so that torch can write its flight record. The
# third one is for a group that is the first of its process: without it a thread of torch's writes that record after any failure,
# traces the stack, waits for eight minutes, and ends the process.
_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_FAREWELL = 5.0  # seconds that closing a communicator may take; it may wait for peers on the same machine

_made = Counter[tuple[int, ...]]()  # groups created so far of these ranks, to keep their keys in the store apart


def new_group(ranks: Sequence[int], size: int, deadline: float, device: torch.device) -> Any:
    """Create and connect a NCCL group of these global ranks; all of them call this together, in the same order.

    It is created directly, like gloo's (see `rendezvous`), so that only its connection keeps it alive. The communicator is
    created here, where all ranks have met, and not at the first send.
    """
    members = tuple(ranks)
    _made[members] += 1
    name = f"gossamer/nccl/{sha256(repr(members).encode()).hexdigest()[:16]}/{_made[members]}"
    backend: Any = dist.ProcessGroupNCCL  # pyright: ignore  # there is none in torch's CPU builds
    options = backend.Options()
    options._timeout = timedelta(seconds=deadline + GRACE)
    options.is_high_priority_stream = True
    options.global_ranks_in_group = list(members)
    options.group_name = name
    store = PrefixStore(name, default_store())
    with _left_to_us():
        group = backend(store, members.index(dist.get_rank()), size, options)
    group.eager_connect_single_device(device)
    return group


@contextmanager
def _left_to_us() -> Generator[None]:
    """Make torch leave NCCL's errors to gossamer, for a group that is created within this context.

    Between machines NCCL notices a lost peer long before any deadline, and torch would then end the process, or let its
    watchdog sleep for a minute, and whoever destroys the group waits for the watchdog. A rank whose deadline is over reports
    the missing ranks and aborts.
    """
    before = {name: os.environ.get(name) for name in _WATCHDOG}
    os.environ.update(_WATCHDOG)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


class Nccl:
    """Answers requests by kernels on the comm thread's stream, in order.

    NCCL's send is a kernel that spins until its receiver is there, so sends and receives are grouped: all sends of a program
    before its next receive, and the receives that the first of these sends awaits, are one exchange. A message must be
    received in the same program, not in a later one.
    """

    def __init__(self, group: Any, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._group: Any = group
        self._device = device
        self._leaving = list[tuple[int, Tensor]]()  # sends of the next exchange
        self._coming = list[tuple[int, Tensor]]()
        self._arrived = defaultdict[int, deque[Tensor]](deque)
        self._torn = False

    def answer(self, verb: Crossing) -> Any:
        if not isinstance(verb, Send):
            self._exchange()
        match verb:
            case AllReduce(tensor, op):
                return all_reduce(self._group, tensor, op) if tensor.numel() else tensor
            case AllGather(wire, read):
                wires = self._all_gather(wire)
                return wires if read is None else read_all(wires, read, self.rank)
            case AllToAll(wires, lengths, read):
                return self._all_to_all(wires, lengths, read)
            case Send(to, wire, awaits):
                return self._send(to, wire, awaits)
            case Receive(source, length):
                return self._receive(source, length)

    def look(self) -> None:
        """Nothing is known before a collective hangs; then the heartbeat ends it."""

    def tear(self) -> None:
        """Abort kernels that wait for a peer; their results are undefined. Peers do not notice it."""
        group, self._torn = self._group, True
        if group is not None:
            _within(_FAREWELL, group.abort)

    def hang_up(self, patience: float) -> None:
        """Destroy a working communicator, which completes its sends; abort a broken one.

        torch's destructor waits for the watchdog's thread: it runs in a thread of its own, which is left if it takes too long.
        """
        held, self._group = [self._group], None
        if held[0] is None:
            return
        if not self._torn:
            _finish(held[0], patience)
        _within(_FAREWELL, held.clear)

    def _all_gather(self, wire: Tensor) -> list[Tensor]:
        if wire.numel() == 0:
            return [wire] * self.size
        out = wire.new_empty(self.size * wire.numel())
        self._group._allgather_base(out, wire.contiguous()).wait()
        return list(out.split(wire.numel()))

    def _all_to_all(
        self, wires: Sequence[Tensor | LazyWire], lengths: Sequence[int], read: Read | None
    ) -> list[Tensor]:
        """Exchange wires between all ranks. A rank's wire to itself is not sent; a rank without data still takes part."""
        ready = {j: made(wires[j]) for j in send_order(self.rank, self.size)}
        there = [0 if j == self.rank else ready[j].numel() for j in range(self.size)]
        back = [0 if j == self.rank else n for j, n in enumerate(lengths)]
        parcel = torch.cat([ready[j] for j in range(self.size) if j != self.rank])
        out = parcel.new_empty(sum(back))
        self._group.alltoall_base(out, parcel, back, there).wait()
        answer = list(out.split(back))
        answer[self.rank] = ready[self.rank]
        return answer if read is None else read_all(answer, read, self.rank)

    def _send(self, to: int, wire: Tensor, awaits: Sequence[tuple[int, int]]) -> None:
        """Send with the other messages of its exchange; at once if no message is awaited."""
        alone = not awaits and not self._coming
        for source, length in awaits:
            self._await(source, length)
        if to == self.rank:
            self._arrived[to].append(wire)
        elif wire.numel():
            self._leaving.append((to, wire.contiguous()))
        if alone:
            self._exchange()

    def _receive(self, source: int | None, length: int) -> Tensor:
        if source is None:
            raise ValueError(
                "NCCL cannot receive from any rank, only from a given one; let gossamer send through the CPU: "
                "process_group=torch.distributed.new_group(backend='gloo')"
            )
        if not self._arrived[source] and source != self.rank:  # a rank that only receives
            self._await(source, length)
            self._exchange()
        if not self._arrived[source] or self._arrived[source][0].numel() != length:
            raise ValueError(
                f"Receive of {length} bytes from rank {source}, which do not match what was sent or awaited"
            )
        return self._arrived[source].popleft()

    def _await(self, source: int, length: int) -> None:
        if source != self.rank:
            self._coming.append((source, torch.empty(length, dtype=torch.uint8, device=self._device)))

    def _exchange(self) -> None:
        """Run all pending sends and receives as one group."""
        leaving, coming = self._leaving, self._coming
        self._leaving, self._coming = [], []
        group = self._group
        if leaving or any(room.numel() for _, room in coming):
            group._start_coalescing()
            for to, wire in leaving:
                group.send([wire], to, 0)
            for source, room in coming:
                if room.numel():
                    group.recv([room], source, 0)
            group._end_coalescing().wait()
        for source, room in coming:
            self._arrived[source].append(room)


def machine() -> str:
    """A name for this machine, as NCCL makes it: clones share the name of their host, and not a boot."""
    boot = ""
    with suppress(OSError):  # not on every system
        boot = BOOT.read_text()[:8]
    return os.environ.get("NCCL_HOSTID") or f"{socket.gethostname()} {boot}".strip()


def card_of(device: torch.device) -> str:
    """The GPU's id and its machine; empty if the GPU has no id."""
    try:
        return f"{torch.cuda.get_device_properties(device).uuid} of {machine()}"
    except Exception:  # depends on versions, builds and drivers; NCCL then reports the error itself
        return ""


def shared_card(cards: Mapping[int, str]) -> str:
    """Says which ranks share a GPU, which NCCL refuses with a less clear message; empty if none do."""
    holders = defaultdict[str, list[int]](list)
    for rank, where in sorted(cards.items()):
        holders[where].append(rank)
    found = next((each for each in holders.items() if each[0] and len(each[1]) > 1), None)
    return f"ranks {', '.join(map(str, found[1]))} share one GPU, {found[0]}, and NCCL refuses that" if found else ""


def refuse_shared(cards: Mapping[int, str]) -> None:
    """Raise an error if two ranks share a GPU."""
    if said := shared_card(cards):
        raise AttachError(
            f"{said}: give each rank a GPU of its own, such as device = torch.device('cuda', int(os.environ['LOCAL_RANK'])), or "
            "let gossamer send through the CPU: process_group=torch.distributed.new_group(backend='gloo')"
        )


def _finish(group: Any, patience: float) -> None:
    end = getattr(group, "shutdown", None) or group._shutdown  # called so until torch 2.6
    if patience <= 0 or not _within(min(patience, _FAREWELL), end):
        _within(_FAREWELL, group.abort)


def _within(seconds: float, call: Callable[[], object]) -> bool:
    """Run a call that may block in a thread; False if it has not returned in time, or failed."""
    fine = list[bool]()

    def run() -> None:
        try:
            call()
            fine.append(True)
        except RuntimeError:
            pass

    thread = threading.Thread(target=run, name="gossamer-farewell", daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(fine)
