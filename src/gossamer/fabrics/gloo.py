"""gloo: a connection of sends and receives between hosts, for tensors in their memory."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]

from gossamer.core.memory_pool import MemoryPool
from gossamer.core.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    LazyWire,
    Read,
    Receive,
    ReduceOp,
    Send,
    receive_order,
    send_order,
)
from gossamer.fabrics.connection import OPS, Crossing, made, read_all
from gossamer.fabrics.pending_sends import FOR_EVER, PendingSends

_AT_ONCE = timedelta(milliseconds=1)
_LETTER, _ROUND, _RECEIPT, _RING, _NOTHING = range(5)  # kinds of wires, told apart by their tags
_LONG = 32_768  # bytes; a shorter wire is through before its receiver could say so

NewBuffer = Callable[[int], Tensor]  # as many bytes of the host's memory


def heap(length: int) -> Tensor:
    return torch.empty(length, dtype=torch.uint8)


def kept() -> NewBuffer:
    """Memory that serves again when what came has been read."""
    buffers = MemoryPool()
    return lambda length: buffers.of(length, torch.device("cpu"))


class Gloo:
    """Blocking, straight-line calls on one process group; with a single rank nothing reaches a backend.

    The group's own methods are called, not the functions around them: those rename themselves from version to version,
    and know only groups that are registered. What arrives is written to `new`.
    """

    def __init__(self, group: Any, rank: int, size: int, new: NewBuffer | None = None) -> None:
        self.rank = rank
        self.size = size
        self._group: Any = group
        self._new = new or kept()
        self._outbox = PendingSends()
        self._own = deque[Tensor]()  # sent by this rank to itself
        self._posted = defaultdict[int, deque[tuple[Any, Tensor]]](
            deque
        )  # by source: receives under way, and where they are written

    def answer(self, verb: Crossing) -> Any:
        if self._outbox.error is not None:
            raise self._outbox.error
        match verb:
            case AllReduce(tensor, op):
                return self._all_reduce(tensor, op)
            case AllGather(wire, read):
                return self._all_gather(wire) if read is None else self._read_all_gather(wire, read)
            case AllToAll(wires, lengths, read):
                return self._all_to_all(wires, lengths, read)
            case Send(to, wire, awaits):
                for source, length in awaits:
                    self._post(source, length)
                return self._send(to, wire)
            case Receive(source, length):
                return self._receive_first(length) if source is None else self._receive(source, length)

    def tear(self) -> None:
        """Close all connections of a gloo group, from any thread: all that waits on it, here and there, fails at once.

        gloo has no call for that. But where it gives up waiting for one receive, it closes the whole group.
        """
        group = self._group  # another thread may let go of it meanwhile
        if not isinstance(self._group, ProcessGroupGloo):
            return
        for rank in range(self.size):
            if rank != self.rank:  # to a rank that is gone already this fails, and closes nothing else
                with suppress(RuntimeError, ValueError):
                    group.recv([torch.zeros(1, dtype=torch.uint8)], rank, _tag(_NOTHING, 1)).wait(_AT_ONCE)

    def hang_up(self, patience: float) -> None:
        """Let go of the group; a gloo group then closes its connections, and peers that wait for it fail at once.

        Only to be called where no collective is under way on it. Letters get some time to leave. No thread may be left
        waiting in gloo: one that wakes while the interpreter is taken down aborts the process.
        """
        if self._group is None:
            return
        if not self._outbox.close(patience) or any(self._posted.values()):
            self.tear()
            self._outbox.close(3.0)
        self._posted.clear()
        self._group = None

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        if self.size > 1 and tensor.numel():
            flat = tensor.contiguous()
            options = dist.AllreduceOptions()
            options.reduceOp = OPS[op]
            options.timeout = FOR_EVER
            self._group.allreduce([flat], options).wait()
            if flat is not tensor:
                tensor.copy_(flat)
        return tensor

    def _all_gather(self, wire: Tensor) -> list[Tensor]:
        if self.size == 1 or wire.numel() == 0:
            return [wire] * self.size
        out = self._new(self.size * wire.numel())
        options = AllgatherOptions()
        options.timeout = FOR_EVER
        self._group._allgather_base(out, wire.contiguous(), options).wait()
        return list(out.split(wire.numel()))

    def _read_all_gather(self, wire: Tensor, read: Read) -> list[Tensor]:
        """A ring of our own: gloo's would not let go of a wire before all are there."""
        if self.size == 1 or wire.numel() == 0:
            return read_all(self._all_gather(wire), read, self.rank)
        ahead, behind = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        came = wire.contiguous()
        for i, source in enumerate(receive_order(self.rank, self.size), start=1):
            coming = self._new(came.numel())
            under_way = list[Any]()
            if i < self.size:
                under_way.append(self._group.recv([coming], behind, _tag(_RING, coming.numel())))
                under_way.append(self._group.send([came], ahead, _tag(_RING, came.numel())))
            read(source, came)
            for work in under_way:
                work.wait(FOR_EVER)
            came = coming
        return []

    def _all_to_all(
        self, wires: Sequence[Tensor | LazyWire], lengths: Sequence[int], read: Read | None
    ) -> list[Tensor]:
        """The own slot never travels. A rank with nothing to say still takes part: the others may have."""
        if self.size > 1:
            return self._in_pairs(wires, lengths, read)
        answer = [made(wires[0])]
        return answer if read is None else read_all(answer, read, self.rank)

    def _in_pairs(self, wires: Sequence[Tensor | LazyWire], lengths: Sequence[int], read: Read | None) -> list[Tensor]:
        """In round i everybody sends to the rank i ahead and hears from the rank i behind.

        So no link ever carries two flows at once: on a slow network they share it badly, and gloo's own all-to-all, which
        sends to all at the same time, takes half as long again. While a round's wires travel, the last round's is read and
        the next round's is made.

        A send is done when the kernel has taken the bytes, and it takes half a megabyte. So who gets a long wire says when
        all of it is there, and only then does the next one leave: without that, at 100 Mbit/s, the rest of each wire
        shared the link with the next, ranks fell out of step, and links stood still for a third of the time.
        """
        answer = dict[int, Tensor]()
        take = answer.__setitem__ if read is None else read
        came = made(wires[self.rank])
        rounds = list(zip(send_order(self.rank, self.size), receive_order(self.rank, self.size)))
        leaving = made(wires[rounds[1][0]])
        for i, (to, source) in enumerate(rounds[1:], start=1):
            coming = self._new(lengths[source])
            under_way, arriving = list[Any](), list[Any]()
            if leaving.numel() >= _LONG:
                under_way.append(self._group.recv([heap(1)], to, _tag(_RECEIPT, 1)))
            if lengths[source]:
                arriving.append(self._group.recv([coming], source, _tag(_ROUND, lengths[source])))
            if leaving.numel():
                under_way.append(self._group.send([leaving.contiguous()], to, _tag(_ROUND, leaving.numel())))
            take(rounds[i - 1][1], came)
            follows = made(wires[rounds[i + 1][0]]) if i + 1 < self.size else leaving
            for work in arriving:
                work.wait(FOR_EVER)
            if lengths[source] >= _LONG:
                under_way.append(self._group.send([heap(1)], source, _tag(_RECEIPT, 1)))
            for work in under_way:
                work.wait(FOR_EVER)
            came, leaving = coming, follows
        take(rounds[-1][1], came)
        return [answer[j] for j in range(self.size)] if read is None else []

    def _send(self, to: int, wire: Tensor) -> None:
        if to == self.rank:
            self._own.append(wire)
        elif wire.numel():
            wire = wire.contiguous()
            self._outbox.put(self._group.send([wire], to, _tag(_LETTER, wire.numel())), wire)

    def _receive(self, source: int, length: int) -> Tensor:
        if source == self.rank:
            if not self._own or self._own[0].numel() != length:
                raise ValueError(f"rank {source} receives {length} bytes from itself that it has not sent")
            return self._own.popleft()
        if not self._posted[source]:
            self._post(source, length)
        work, out = self._posted[source].popleft()
        if out.numel() != length:
            raise ValueError(f"{length} bytes asked of rank {source}, from which {out.numel()} were awaited")
        if work is not None:
            work.wait(FOR_EVER)
        return out

    def _receive_first(self, length: int) -> tuple[int, Tensor]:
        """Whoever's letter is there. What was awaited of somebody is that one's."""
        if self._own or self._group is None:
            return self.rank, self._receive(self.rank, length)
        out = self._new(length)
        work = self._group.recv_anysource([out], _tag(_LETTER, length))
        work.wait(FOR_EVER)
        return int(work._source_rank()), out

    def _post(self, source: int, length: int) -> None:
        """Tell the backend what will be received. gloo asks the sender for it on the same wire on which the own letters
        leave: behind a long one, the other direction would stand still until it is through.
        """
        if source == self.rank:
            return
        out = self._new(length)
        work = self._group.recv([out], source, _tag(_LETTER, length)) if length else None
        self._posted[source].append((work, out))


def _tag(kind: int, length: int) -> int:
    """What a wire is called on the network. Of another length it has another name: gloo ends the process where a wire is
    longer than what waits for it, and takes a shorter one without a word; so it waits, and is missed in the end.
    """
    return (kind << 28) + length % 2**28
