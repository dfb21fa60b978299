"""A GPU's tensors over gloo: what travels goes through pinned memory of the host, around a gloo connection."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.core.verbs import AllGather, AllReduce, AllToAll, LazyWire, Read, Receive, Send
from gossamer.fabrics.connection import Crossing, made
from gossamer.fabrics.gloo import Gloo


def pinned(length: int) -> Tensor:
    """Bytes of the host's memory that a GPU copies to and from by itself. What is freed, torch keeps for the next."""
    return torch.empty(length, dtype=torch.uint8, pin_memory=True)


class Staged:
    """Copies down, waits for the copy in the lane's thread, lets gloo carry it, and copies up what has come.

    On slow links the copies cost little; and deadlines, errors that name a rank, and peers that wake are gloo's.
    """

    def __init__(self, group: Any, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._device = device
        self._gloo = Gloo(group, rank, size, new=pinned)
        self._rising = list[Tensor]()  # what the GPU may still be copying up

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
        """The own slot stays where it is."""
        own = list[Tensor]()

        def descent(j: int) -> LazyWire:
            def make() -> Tensor:
                wire = made(wires[j])
                if j != self.rank:
                    return self._down(wire)
                own.append(wire)
                return torch.empty(0, dtype=torch.uint8)

            return LazyWire(make, 0 if j == self.rank else wires[j].numel())

        def risen(source: int, came: Tensor) -> Tensor:
            return own[0] if source == self.rank else self._up(came)

        def raise_and_read(source: int, came: Tensor) -> None:
            assert read is not None
            read(source, risen(source, came))

        below = [descent(j) for j in range(self.size)]
        back = [0 if j == self.rank else n for j, n in enumerate(lengths)]
        came = self._gloo.answer(AllToAll(below, back, None if read is None else raise_and_read))
        return [risen(j, wire) for j, wire in enumerate(came)]

    def _down(self, tensor: Tensor) -> Tensor:
        """A copy in the host's memory. Waiting for it lets other threads have the interpreter."""
        host = pinned(tensor.numel() * tensor.element_size()).view(tensor.dtype).view(tensor.shape)
        host.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)
        copied.record(torch.cuda.current_stream(self._device))
        copied.synchronize()
        self._rising.clear()  # it came before, on the same stream
        return host

    def _up(self, host: Tensor) -> Tensor:
        """A copy on the device, there for whoever reads it on the lane's stream."""
        tensor = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        tensor.copy_(host, non_blocking=True)
        self._rising.append(host)
        return tensor
