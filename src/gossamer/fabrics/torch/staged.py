"""A connection for GPU tensors over gloo, through pinned host memory."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.core.verbs import AllGather, AllReduce, AllToAll, Receive, Send
from gossamer.core.wire import LazyWire, Read
from gossamer.fabrics.torch.connection import Crossing, made
from gossamer.fabrics.torch.gloo import Gloo


def pinned(length: int) -> Tensor:
    """Pinned host memory of `length` bytes; torch caches it when it is freed."""
    return torch.empty(length, dtype=torch.uint8, pin_memory=True)


class Staged:
    """Copies tensors to the host, sends them over gloo, and copies received tensors to the GPU.

    On slow links the copies cost little. Deadlines and errors that name a rank work as for gloo.
    """

    def __init__(self, group: Any, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._device = device
        self._gloo = Gloo(group, rank, size, new=pinned)
        self._rising = list[Tensor]()  # host tensors that the GPU may still be copying

    def answer(self, verb: Crossing) -> Any:
        match verb:
            case AllReduce(tensor, op):
                if tensor.numel():
                    sums = self._gloo.answer(AllReduce(self._down(tensor), op))
                    tensor.copy_(sums, non_blocking=True)
                    self._rising.append(sums)
                return tensor
            case AllGather(wire, read, agreed):
                return self._all_gather(wire, read, agreed)
            case AllToAll(wires, lengths, read):
                return self._all_to_all(wires, lengths, read)
            case Send(to, wire, awaits):
                return self._gloo.answer(Send(to, self._down(wire), awaits))
            case Receive(source):
                answer = self._gloo.answer(verb)
                return self._up(answer) if source is not None else (answer[0], self._up(answer[1]))

    def look(self) -> None:
        self._gloo.look()

    def tear(self) -> None:
        self._gloo.tear()

    def hang_up(self, patience: float) -> None:
        self._gloo.hang_up(patience)

    def _all_gather(self, wire: Tensor, read: Read | None, agreed: bool) -> list[Tensor]:
        if read is None:
            return [self._up(came) for came in self._gloo.answer(AllGather(self._down(wire), None, agreed))]

        def raise_and_read(source: int, came: Tensor) -> None:
            read(source, wire if source == self.rank else self._up(came))

        return self._gloo.answer(AllGather(self._down(wire), raise_and_read, agreed))

    def _all_to_all(
        self, wires: Sequence[Tensor | LazyWire], lengths: Sequence[int], read: Read | None
    ) -> list[Tensor]:
        """Exchange wires between all ranks; a rank's wire to itself stays on the GPU."""
        own = list[Tensor]()

        def host_wire(j: int) -> LazyWire:
            def make() -> Tensor:
                wire = made(wires[j])
                if j != self.rank:
                    return self._down(wire)
                own.append(wire)
                return torch.empty(0, dtype=torch.uint8)

            return LazyWire(make, 0 if j == self.rank else wires[j].numel())

        def on_device(source: int, came: Tensor) -> Tensor:
            return own[0] if source == self.rank else self._up(came)

        def raise_and_read(source: int, came: Tensor) -> None:
            assert read is not None
            read(source, on_device(source, came))

        below = [host_wire(j) for j in range(self.size)]
        back = [0 if j == self.rank else n for j, n in enumerate(lengths)]
        came = self._gloo.answer(AllToAll(below, back, None if read is None else raise_and_read))
        return [on_device(j, wire) for j, wire in enumerate(came)]

    def _down(self, tensor: Tensor) -> Tensor:
        """A copy in host memory. Other Python threads can run while this one waits for it."""
        host = pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        host.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)
        copied.record(torch.cuda.current_stream(self._device))
        copied.synchronize()
        self._rising.clear()  # these copies were queued earlier, on the same stream
        return host

    def _up(self, host: Tensor) -> Tensor:
        """A copy on the device, ready for kernels on the comm thread's stream."""
        tensor = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        tensor.copy_(host, non_blocking=True)
        self._rising.append(host)
        return tensor
