"""A process group that holds its user to NCCL's rules. The numbers travel over gloo.

1. It takes CUDA tensors only, contiguous ones, and reduces the types that NCCL reduces.
2. Every communicator is one stream: what is launched on it runs in order, each to its end. The host does not wait for it,
   `work.wait()` makes the current stream wait.
3. All ranks launch the same operations on a communicator, in the same order; else they hang, or add up wrong things.
4. A communicator is made by all its ranks in a call that blocks the host. With `eager` (a bound device) there is one for
   everything, made at once. Lazily, the first collective makes it; and every pair of ranks that send to each other outside of a
   group makes one of its own.
5. A send is a kernel that spins until its receive is there. What lies in one group (`_start_coalescing` to
   `_end_coalescing`, `alltoall_base`) goes at once, in no order. Tags mean nothing. The first message from one rank to another
   connects them, which both must do, and nothing of its group moves before all of the group are connected.
6. No exception ever: what waits for a rank that is gone waits on, and when the watchdog's time is over, the process ends.
   Who aborts a communicator before that ends its kernels, which leave things as they are.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tests.gpu.clocks import Clock, Stream, current_stream, everyone, finished, merge
from tests.gpu.diary import diary, lock, place
from tests.gpu.memory import Use
from tests.gpu.tensors import Cuda
from torch import Tensor

TEXT = 160  # bytes that an operation is described in
CODE = 134  # what a process ends with that the watchdog ends
FOR_EVER = timedelta(days=1)
_RECEIPT, _PARCEL, _HELLO = 1 << 20, 1 << 21, 1 << 22  # kinds of wires, told apart by their tags

REDUCED = {
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}
OPERATORS = {"SUM": dist.ReduceOp.SUM, "MAX": dist.ReduceOp.MAX, "MIN": dist.ReduceOp.MIN}

last_words: Path | None = None  # where a process says why it ends


class Launch(NamedTuple):
    """One operation in flight, for those who compare orders."""

    communicator: str
    number: int
    known: dict[str, int]  # of the other communicators: what was known to have ended
    text: str


class Posting(NamedTuple):
    """A send or a receive: the numbers, and the other rank."""

    inner: Tensor
    peer: int
    sends: bool


class Work:
    def __init__(self, communicator: "Communicator", text: str) -> None:
        self.communicator, self.text = communicator, text
        self.began = time.monotonic()
        self.clock: Clock = {}
        self._ended = threading.Event()

    def wait(self, timeout: Any = None) -> bool:
        """The current stream waits, not the host. (Here the host must, to have the numbers.)"""
        with lock:
            merge(current_stream(self.communicator.device).clock, self.clock)
        self._ended.wait()
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def end(self) -> None:
        self._ended.set()


class Watchdog:
    """Ends the process when an operation, or the making of a communicator, takes too long."""

    def __init__(self) -> None:
        self._under_way = dict[object, tuple[float, str]]()
        self._started = False

    def begin(self, what: object, patience: float, text: str) -> None:
        self._under_way[what] = time.monotonic() + patience, text
        if not self._started:
            self._started = True
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def end(self, what: object) -> None:
        self._under_way.pop(what, None)

    def _watch(self) -> None:
        while True:
            time.sleep(0.05)
            for until, text in list(self._under_way.values()):
                if time.monotonic() > until:
                    die(f"has not ended in time: {text}")


watchdog = Watchdog()


def die(text: str) -> None:
    if last_words is not None:
        last_words.write_text(f"the watchdog ends this process: {text}")
    os._exit(CODE)


class Communicator:
    """Some ranks and a stream."""

    def __init__(self, group: "StrictGroup", key: str, ranks: Sequence[int], device: int) -> None:
        self.group, self.key, self.ranks, self.device = group, key, list(ranks), device
        self.name = f"{group.name}/{key}"
        self.stream = Stream(device, name=f"NCCL's {self.name}")
        self.number = 0
        everyone.append(self.stream)
        watchdog.begin(self, group.patience, f"the making of communicator {self.name} at {place(3)}")
        store = dist.PrefixStore(f"{group.name}/{key}", group.store)
        self.gloo = dist.ProcessGroupGloo(store, self.ranks.index(group.rank), len(self.ranks), timedelta(hours=1))
        watchdog.end(self)
        self._queue = queue.SimpleQueue[tuple[Work, str, Callable[[], None]] | None]()
        self._under_way = list[Work]()
        self._connected = set[tuple[int, bool]]()  # peers, and whether something is sent to them
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def launch(
        self,
        text: str,
        reads: Sequence[Cuda],
        writes: Sequence[Cuda],
        run: Callable[[], None],
        agreed: bool = True,
    ) -> Work:
        """Put an operation on the stream; `agreed` says that all ranks must do the same."""
        self.number += 1
        work, at = Work(self, text), place(2)
        with lock:
            merge(self.stream.clock, current_stream(self.device).clock)
            use = Use(self.stream, self.stream.tick(), f"{text} ({at})")
            for tensor in reads:
                tensor.memory.read(use)
            for tensor in writes:
                tensor.memory.write(use)
            work.clock = dict(self.stream.clock)
            diary.crossings += 1
            launched.append(Launch(self.name, self.number, self._known(), text))
        self._under_way = [w for w in self._under_way if not w.is_completed()] + [work]
        watchdog.begin(work, self.group.patience, f"{text}, number {self.number} on {self.name}, at {at}")
        self._queue.put((work, text if agreed else "", run))
        return work

    def _known(self) -> dict[str, int]:
        """How many operations of the other communicators are over when the next one here begins."""
        others = [c for g in groups for c in g.communicators.values() if c is not self]
        return {c.name: max(self.stream.clock.get(c.stream, 0), finished.get(c.stream, 0)) for c in others}

    def _run(self) -> None:
        with torch.no_grad():
            while (order := self._queue.get()) is not None:
                work, agreed, run = order
                try:
                    if agreed:
                        self._agree(agreed)
                    run()
                except RuntimeError:  # a peer is gone: on a GPU the kernel does not know
                    return
                except BaseException as error:
                    die(f"{work.text} on {self.name}: {type(error).__name__}: {error}")
                watchdog.end(work)
                work.end()

    def abort(self) -> None:
        for work in self._under_way:
            watchdog.end(work)
            work.end()

    def _agree(self, text: str) -> None:
        mine = torch.zeros(TEXT, dtype=torch.uint8)
        words = text.encode()[:TEXT]
        mine[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        said = [torch.empty_like(mine) for _ in self.ranks]
        self.gloo.allgather([said], [mine]).wait(FOR_EVER)
        texts = {r: bytes(s.tolist()).rstrip(b"\0").decode() for r, s in zip(self.ranks, said)}
        if len(set(texts.values())) > 1:
            die(
                f"operation {self.number} on {self.name} differs between ranks, which hangs or adds up wrong things: {texts}"
            )

    def exchange(self, postings: Sequence[Posting]) -> None:
        """One group of sends and receives. A sender waits until its receiver has come; receivers say so."""
        self._connect({(posting.peer, posting.sends) for posting in postings} - self._connected)
        works, tags = list[Any](), dict[tuple[int, bool], int]()
        awaited = list[tuple[Any, Posting, int]]()
        for posting in postings:
            way = posting.peer, posting.sends
            tag, peer = tags.get(way, 0), self.ranks.index(posting.peer)
            tags[way] = tag + 1
            if posting.sends:
                awaited.append((self.gloo.recv([torch.zeros(1)], peer, _RECEIPT + tag), posting, tag))
            else:
                works.append(self.gloo.recv([posting.inner], peer, _PARCEL + tag))
                works.append(self.gloo.send([torch.zeros(1)], peer, _RECEIPT + tag))
        for receipt, posting, tag in awaited:
            receipt.wait(FOR_EVER)
            works.append(self.gloo.send([posting.inner], self.ranks.index(posting.peer), _PARCEL + tag))
        for work in works:
            work.wait(FOR_EVER)

    def _connect(self, new: AbstractSet[tuple[int, bool]]) -> None:
        """Both ranks of each new connection say that they are there."""
        works = list[Any]()
        for peer, sends in sorted(new):
            at = self.ranks.index(peer)
            works.append(self.gloo.send([torch.zeros(1)], at, _HELLO + sends))
            works.append(self.gloo.recv([torch.zeros(1)], at, _HELLO + (not sends)))
        for work in works:
            work.wait(FOR_EVER)
        self._connected |= new


class StrictGroup:
    """What fabrics/torch/nccl.py gets for a process group."""

    def __init__(
        self, store: Any, name: str, rank: int, size: int, device: torch.device, eager: bool, patience: float
    ) -> None:
        self.store, self.name, self.rank, self.size = store, name, rank, size
        self.device, self.eager, self.patience = device, eager, patience
        self.communicators = dict[str, Communicator]()
        self.ended = ""  # how: "aborted" or "shut down"
        self._posted: list[tuple[Cuda, int, bool]] | None = None  # of the group that is open
        groups.append(self)
        if eager:
            self._communicator()

    # -- collectives -------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Work:
        (x,) = self._checked(*tensors)
        if x.dtype not in REDUCED:
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {x.dtype}")
        asked = dist.ReduceOp.SUM if options is None else options.reduceOp
        name = next(n for n, op in OPERATORS.items() if asked == op)
        chosen = dist.AllreduceOptions()
        chosen.reduceOp, chosen.timeout = OPERATORS[name], FOR_EVER
        communicator = self._communicator()

        def run() -> None:
            communicator.gloo.allreduce([x.inner], chosen).wait(FOR_EVER)

        return communicator.launch(f"allreduce({name}, {_described(x)})", [], [x], run)

    def _allgather_base(self, out: Tensor, wire: Tensor, options: Any = None) -> Work:
        into, x = self._checked(out, wire)
        if into.numel() != self.size * x.numel():
            raise ValueError("output tensor size must be equal to world_size times input tensor size")
        communicator = self._communicator()

        def run() -> None:
            parts = list(into.inner.split(x.numel()))
            communicator.gloo.allgather([parts], [x.inner]).wait(FOR_EVER)

        return communicator.launch(f"allgather({_described(x)})", [x], [into], run)

    def alltoall_base(
        self, out: Tensor, wire: Tensor, back: Sequence[int], there: Sequence[int], options: Any = None
    ) -> Work:
        into, x = self._checked(out, wire)
        communicator = self._communicator()
        parcels, rooms = x.inner.split(list(there)), into.inner.split(list(back))
        mine = [Posting(p, j, True) for j, p in enumerate(parcels) if p.numel() and j != self.rank]
        mine += [Posting(p, j, False) for j, p in enumerate(rooms) if p.numel() and j != self.rank]

        def run() -> None:
            if rooms[self.rank].numel():
                rooms[self.rank].copy_(parcels[self.rank])
            communicator.exchange(mine)

        return communicator.launch("alltoall", [x], [into], run)

    # -- point to point ----------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Work | None:
        return self._post(*self._checked(*tensors), to, True)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Work | None:
        return self._post(*self._checked(*tensors), source, False)

    def _start_coalescing(self, device: Any = None) -> None:
        self._posted = []

    def _end_coalescing(self, device: Any = None) -> Work | None:
        """All at once, on the communicator of all ranks."""
        posted, self._posted = self._posted or [], None
        return self._launch(self._communicator(), posted) if posted else None

    def _post(self, x: Cuda, peer: int, sends: bool) -> Work | None:
        if self._posted is None:
            return self._launch(self._communicator(peer), [(x, peer, sends)])
        self._posted.append((x, peer, sends))
        return None

    def _launch(self, communicator: Communicator, posted: list[tuple[Cuda, int, bool]]) -> Work:
        words = " + ".join(f"{'send' if sends else 'recv'}({_described(x)}, {peer})" for x, peer, sends in posted)
        reads, writes = [x for x, _, sends in posted if sends], [x for x, _, sends in posted if not sends]
        postings = [Posting(x.inner, peer, sends) for x, peer, sends in posted]
        return communicator.launch(words, reads, writes, lambda: communicator.exchange(postings), agreed=False)

    # -- the end -----------------------------------------------------------------------------------------------------

    def abort(self, *_: Any) -> None:
        self.ended = "aborted"
        for communicator in self.communicators.values():
            communicator.abort()

    def shutdown(self, *_: Any) -> None:
        self.ended = self.ended or "shut down"

    # -- the inside --------------------------------------------------------------------------------------------------

    def _communicator(self, peer: int | None = None) -> Communicator:
        key, ranks = "all", list(range(self.size))
        if peer is not None and not self.eager:
            ranks = sorted((self.rank, peer))
            key = f"{ranks[0]}:{ranks[1]}"
        if key not in self.communicators:
            made = Communicator(self, key, ranks, self.device.index)
            self.communicators[key] = made
        return self.communicators[key]

    def _checked(self, *tensors: Tensor) -> list[Cuda]:
        out = list[Cuda]()
        for x in tensors:
            if not isinstance(x, Cuda):
                raise RuntimeError(f"No backend type associated with device type cpu (at {place(3)})")
            if not x.inner.is_contiguous():
                raise ValueError("Tensors must be contiguous")
            if x.index != self.device.index:
                raise RuntimeError(f"a tensor of {x.device} on a communicator of {self.device} (at {place(3)})")
            out.append(x)
        return out


groups = list[StrictGroup]()
launched = list[Launch]()  # by this process, on all communicators, in order


def _described(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} x {x.numel()}"
