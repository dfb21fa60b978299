"""NCCL: a connection between GPUs. Its calls put kernels on a stream; nobody waits for them here."""

import os
import socket
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.core.errors import AttachError
from gossamer.core.verbs import AllGather, AllReduce, AllToAll, LazyWire, Read, Receive, ReduceOp, Send, send_order
from gossamer.fabrics.connection import OPS, Crossing, made, read_all
from gossamer.fabrics.store import default_store

GRACE = 60.0  # seconds that NCCL's watchdog, which may end the process, waits longer than we do
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_FAREWELL = 5.0  # seconds that the end of a communicator may take; some wait for their peers on the same machine

_made = Counter[tuple[int, ...]]()  # groups made so far of these ranks, to tell their keys in the store apart


def new_group(ranks: Sequence[int], size: int, deadline: float, device: torch.device) -> Any:
    """A NCCL group of these global ranks, connected; all of them make theirs at once, and in the same order.

    Made directly, as gloo's is (see `book`), so that nothing keeps it but its connection. The communicator is made here,
    where all ranks have met, and not by whatever is sent first.
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
    """Between machines NCCL notices that a peer is gone long before any deadline, and torch would end the process then.

    That it shall not is said by a variable which torch reads when a group is made (0: NoHandling; pytorch#155916), and which
    torchrun sets to the contrary. Whoever's deadline is over says who is missing, and aborts.
    """
    before = os.environ.get(_HANDLING)
    os.environ[_HANDLING] = "0"
    try:
        yield
    finally:
        os.environ.pop(_HANDLING)
        if before is not None:
            os.environ[_HANDLING] = before


class Nccl:
    """Requests become kernels on the lane's stream, in the order they come in.

    NCCL's send is a kernel that spins until its receiver is there, so sends and receives go in groups: all that a program
    sends before it receives again, and all that the first of these sends awaits, is one exchange. Nothing that
    is sent may wait for a later program to be read.
    """

    def __init__(self, group: Any, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._group: Any = group
        self._device = device
        self._leaving = list[tuple[int, Tensor]]()  # of the next exchange
        self._coming = list[tuple[int, Tensor]]()
        self._arrived = defaultdict[int, deque[Tensor]](deque)
        self._torn = False

    def answer(self, verb: Crossing) -> Any:
        if not isinstance(verb, Send):
            self._exchange()
        match verb:
            case AllReduce(tensor, op):
                return self._all_reduce(tensor, op)
            case AllGather(wire, read):
                wires = self._all_gather(wire)
                return wires if read is None else read_all(wires, read, self.rank)
            case AllToAll(wires, lengths, read):
                return self._all_to_all(wires, lengths, read)
            case Send(to, wire, awaits):
                return self._send(to, wire, awaits)
            case Receive(source, length):
                return self._receive(source, length)

    def tear(self) -> None:
        """Kernels that wait for a peer end; what they should have written is not there. Peers are not woken by it."""
        group, self._torn = self._group, True
        if group is not None:
            _within(_FAREWELL, group.abort)

    def hang_up(self, patience: float) -> None:
        """A communicator in order is destroyed, which sees through what its peers still read; else it is aborted."""
        group, self._group = self._group, None
        if group is None or self._torn:
            return
        end = getattr(group, "shutdown", None) or group._shutdown  # called so until torch 2.6
        if patience <= 0 or not _within(min(patience, _FAREWELL), end):
            _within(_FAREWELL, group.abort)

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        if tensor.numel():
            flat = tensor.contiguous()
            options = dist.AllreduceOptions()
            options.reduceOp = OPS[op]
            self._group.allreduce([flat], options).wait()
            if flat is not tensor:
                tensor.copy_(flat)
        return tensor

    def _all_gather(self, wire: Tensor) -> list[Tensor]:
        if wire.numel() == 0:
            return [wire] * self.size
        out = wire.new_empty(self.size * wire.numel())
        self._group._allgather_base(out, wire.contiguous()).wait()
        return list(out.split(wire.numel()))

    def _all_to_all(
        self, wires: Sequence[Tensor | LazyWire], lengths: Sequence[int], read: Read | None
    ) -> list[Tensor]:
        """The own slot never travels. A rank with nothing to say still takes part: the others may have."""
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
        """It leaves with the others of its round; where none is awaited and nothing has begun one, at once."""
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
                "NCCL cannot receive from whoever is first; let gossamer send by way of the CPU: "
                "process_group=torch.distributed.new_group(backend='gloo')"
            )
        if not self._arrived[source] and source != self.rank:  # a rank that only receives
            self._await(source, length)
            self._exchange()
        if not self._arrived[source] or self._arrived[source][0].numel() != length:
            raise ValueError(f"{length} bytes asked of rank {source}, which are not what was sent or awaited")
        return self._arrived[source].popleft()

    def _await(self, source: int, length: int) -> None:
        if source != self.rank:
            self._coming.append((source, torch.empty(length, dtype=torch.uint8, device=self._device)))

    def _exchange(self) -> None:
        """One group of sends and receives: all at once, in no order."""
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
    """What NCCL calls this machine."""
    return os.environ.get("NCCL_HOSTID") or socket.gethostname()


def card_of(device: torch.device) -> str:
    """Which GPU of which machine this is; empty where it does not say so."""
    try:
        return f"{torch.cuda.get_device_properties(device).uuid} of {machine()}"
    except Exception:  # as versions, builds and drivers have it: then NCCL will find out
        return ""


def refuse_shared(cards: Mapping[int, str]) -> None:
    """NCCL would fail in words of its own."""
    holders = defaultdict[str, list[int]](list)
    for rank, where in sorted(cards.items()):
        holders[where].append(rank)
    for where, ranks in holders.items():
        if where and len(ranks) > 1:
            raise AttachError(
                f"ranks {', '.join(map(str, ranks))} share one GPU, {where}, and NCCL refuses that: give each rank a GPU of its "
                "own, such as device = torch.device('cuda', int(os.environ['LOCAL_RANK'])), or let gossamer send by way of the "
                "CPU: process_group=torch.distributed.new_group(backend='gloo')"
            )


def _within(seconds: float, call: Callable[[], object]) -> bool:
    """Call what may block, in a thread that can be left; False if it has not returned in time, or failed."""
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
