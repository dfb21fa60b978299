"""A connection over gloo, for tensors in the host's memory."""

import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import product
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d

from gossamer.core.memory_pool import MemoryPool
from gossamer.core.torch_private import private_name
from gossamer.core.verbs import AllGather, AllReduce, AllToAll, Receive, Send
from gossamer.core.wire import LazyWire, Read, receive_order, send_order
from gossamer.fabrics.torch.connection import Crossing, all_reduce, made, read_all

_Options: Any = private_name(_distributed_c10d, "AllgatherOptions", "gathers over gloo without a copy")
_AT_ONCE = timedelta(milliseconds=1)
_LETTER, _ROUND, _RECEIPT, _RING, _NOTHING = range(5)  # kinds of messages, part of their tags
_LONG = 32_768  # bytes; a shorter wire arrives before its receiver could confirm it

NewBuffer = Callable[[int], Tensor]  # returns that many bytes of host memory


def heap(length: int) -> Tensor:
    return torch.empty(length, dtype=torch.uint8)


def kept() -> NewBuffer:
    """Buffers from a pool: memory is used again when the received tensor is freed."""
    buffers = MemoryPool()
    return lambda length: buffers.of(length, torch.device("cpu"))


class Gloo:
    """Answers requests with blocking calls on one process group; a single rank needs no backend.

    It calls the group's own methods, not the functions of torch.distributed: those change their names between versions, and
    take registered groups only. Received tensors are written to buffers of `new`.
    """

    def __init__(self, group: Any, rank: int, size: int, new: NewBuffer | None = None) -> None:
        self.rank = rank
        self.size = size
        self._group: Any = group
        self._new = new or kept()
        # It has connections of their own over each network card; a tag's remainder says over which a message goes.
        self._cards = os.environ.get("GLOO_SOCKET_IFNAME", "").count(",") + 1
        self._outbox = PendingSends()
        self._own = deque[Tensor]()  # sent by this rank to itself
        # Receives under way, and their buffers, by source.
        self._posted = defaultdict[int, deque[tuple[Any, Tensor]]](deque)

    def answer(self, verb: Crossing) -> Any:
        if self._outbox.error is not None:
            raise self._outbox.error
        match verb:
            case AllReduce(tensor, op):
                crosses = self.size > 1 and tensor.numel()
                return all_reduce(self._group, tensor, op, FOR_EVER) if crosses else tensor
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

    def look(self) -> None:
        """Raise an error if the connection to another rank has ended, while nothing is under way that would show it.

        gloo has no question for that, but it posts no receive on a connection that has ended. The message never comes.
        """
        group = self._group
        for rank in range(self.size) if isinstance(self._group, dist.ProcessGroupGloo) else ():
            if rank != self.rank:
                group.recv([heap(1)], rank, _tag(_NOTHING, 0))

    def tear(self) -> None:
        """Close all connections of a gloo group, from any thread: waits on it fail at once, on this rank and its peers.

        gloo has no call for that. But when a receive times out, it closes the whole group over that network card.
        """
        group = self._group  # another thread may close it meanwhile
        if not isinstance(self._group, dist.ProcessGroupGloo):
            return
        for rank, card in product(range(self.size), range(self._cards)):
            if rank != self.rank:  # for a rank that has ended already this fails, without other effects
                with suppress(RuntimeError, ValueError):
                    group.recv([torch.zeros(1, dtype=torch.uint8)], rank, _tag(_NOTHING, 1 + card)).wait(_AT_ONCE)

    def hang_up(self, patience: float) -> None:
        """Release the group; a gloo group then closes its connections, and peers that wait for it fail at once.

        Call it only while no collective is under way. Sends get some time to end. No thread may stay in a gloo wait: one
        that wakes while the interpreter shuts down aborts the process.
        """
        if self._group is None:
            return
        if not self._outbox.close(patience) or any(self._posted.values()):
            self.tear()
            self._outbox.close(3.0)
        self._posted.clear()
        self._group = None

    def _all_gather(self, wire: Tensor) -> list[Tensor]:
        if self.size == 1 or wire.numel() == 0:
            return [wire] * self.size
        out = self._new(self.size * wire.numel())
        options = _Options()
        options.timeout = FOR_EVER
        self._group._allgather_base(out, wire.contiguous(), options).wait()
        return list(out.split(wire.numel()))

    def _read_all_gather(self, wire: Tensor, read: Read) -> list[Tensor]:
        """Gather in a ring, and read each wire when it arrives; gloo's all-gather returns only all wires together."""
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
        """Exchange wires between all ranks. A rank's wire to itself is not sent; a rank without data still takes part."""
        if self.size > 1:
            return self._in_pairs(wires, lengths, read)
        answer = [made(wires[0])]
        return answer if read is None else read_all(answer, read, self.rank)

    def _in_pairs(self, wires: Sequence[Tensor | LazyWire], lengths: Sequence[int], read: Read | None) -> list[Tensor]:
        """Exchange wires in rounds: in round i every rank sends to the rank i ahead and receives from the rank i behind.

        So no link carries two flows at once: on a slow network they share it badly, and gloo's own all-to-all, which sends
        to all ranks at the same time, takes 1.5 times as long. While the wires of a round travel, the wire of the last round
        is read and the wire of the next round is made.

        A send ends when the operating system has taken the bytes, and it buffers half a megabyte. So the receiver of a long
        wire confirms that all of it has arrived, and only then the next wire is sent. Without that, at 100 Mbit/s, the rest
        of each wire shared the link with the next, ranks fell out of step, and links were idle for a third of the time.
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
                raise ValueError(
                    f"rank {source} receives {length} bytes from itself, but has not sent them: send them first"
                )
            return self._own.popleft()
        if not self._posted[source]:
            self._post(source, length)
        work, out = self._posted[source].popleft()
        if out.numel() != length:
            raise ValueError(
                f"Receive of {length} bytes from rank {source}, but the last Send awaits {out.numel()} bytes of it"
            )
        if work is not None:
            work.wait(FOR_EVER)
        return out

    def _receive_first(self, length: int) -> tuple[int, Tensor]:
        """Receive the first message of any rank; messages that a Send awaits from a rank are not meant."""
        if self._own or self._group is None:
            return self.rank, self._receive(self.rank, length)
        out = self._new(length)
        work = self._group.recv_anysource([out], _tag(_LETTER, length))
        work.wait(FOR_EVER)
        return int(work._source_rank()), out

    def _post(self, source: int, length: int) -> None:
        """Post a receive to the backend, before this rank sends.

        gloo asks the sender for it over the connection that also carries this rank's messages: a request behind a long
        message would leave the other direction idle until that message is sent.
        """
        if source == self.rank:
            return
        out = self._new(length)
        work = self._group.recv([out], source, _tag(_LETTER, length)) if length else None
        self._posted[source].append((work, out))


def _tag(kind: int, length: int) -> int:
    """The tag of a wire, different for each kind and length.

    gloo ends the process if a wire is longer than its receive buffer, and accepts a shorter one without an error. With
    different tags such a receive waits instead, and the heartbeat ends it.
    """
    return (kind << 28) + length % 2**28


FOR_EVER = timedelta(days=1000)  # timeout of the backend itself: the heartbeat decides when to stop waiting


class PendingSends:
    """Waits for sends in a thread of its own.

    A backend may hold a message back until its receiver asks for it, perhaps several programs later; so neither the
    sending program nor its comm thread can wait. gloo cannot be asked whether a send is done, only waited for.
    """

    def __init__(self) -> None:
        self.error: RuntimeError | None = None
        self._letters = SimpleQueue[tuple[Any, Tensor]]()
        self._thread: threading.Thread | None = None
        self._closing = False

    def put(self, work: Any, wire: Tensor) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="gossamer-outbox", daemon=True)
            self._thread.start()
        self._letters.put((work, wire))

    def close(self, patience: float) -> bool:
        """Wait for the last sends, at most `patience` seconds; False if some are still in flight."""
        if self._thread is None:
            return True
        if not self._closing:
            self._closing = True
            self._letters.put((None, Tensor()))
        self._thread.join(patience)
        return not self._thread.is_alive()

    def _wait(self) -> None:
        while (letter := self._letters.get())[0] is not None:
            try:
                letter[0].wait(FOR_EVER)
            except RuntimeError as error:
                self.error = self.error or error
            del letter
