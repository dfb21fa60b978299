"""The intake: gradients come in one by one during backward, and leave in channels, always in the same order."""

from collections.abc import Callable

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket
from gossamer.core.errors import AttachError
from gossamer.core.memory_pool import holders
from gossamer.runtime import Worker


class GradBuckets:
    """Collects gradients into flat buffers; a channel is launched when it and all before it are full."""

    def __init__(self, worker: Worker, launch: Callable[[int, Tensor], None]) -> None:
        self.worker, self.launch = worker, launch
        self.flats = [c.empty() for c in worker.buckets]
        self.slots = dict[str, tuple[int, Tensor]]()
        for i in range(len(self.flats)):
            self._cut(i)
        self.sizes = [len(c.layout.segments) for c in worker.buckets]
        self._holders = [holders(flat) for flat in self.flats]
        self.reset()

    def reset(self) -> None:
        """A backward pass begins: nothing has arrived, and what users keep of the last one's gradients stays as it is."""
        self.arrived = set[str]()
        self.missing = list(self.sizes)
        self.next = 0
        for i, flat in enumerate(self.flats):
            if holders(flat) > self._holders[i] and self._is_kept(i):
                self.flats[i] = self.worker.buckets[i].empty()
                self._cut(i)

    def _cut(self, i: int) -> None:
        for name, view in Bucket(self.flats[i], self.worker.buckets[i].layout).tensors():
            self.slots[name] = i, view

    def _is_kept(self, i: int) -> bool:
        """Does anybody but the parameters themselves hold a gradient that lies in this buffer?"""
        address = self.flats[i].untyped_storage().data_ptr()
        grads = [g for param in self.worker.buckets[i].params if (g := param.gradient) is not None]
        ours = sum(g.untyped_storage().data_ptr() == address for g in grads)
        return holders(self.flats[i]) > self._holders[i] + ours

    def view(self, name: str) -> Tensor:
        """Where a parameter's gradient lies; a new view each time, so that it is known how many there are."""
        slot = self.slots[name][1]
        return slot.view_as(slot)

    def take(self, name: str, gradient: Tensor) -> None:
        """One parameter's gradient is ready."""
        index, slot = self.slots[name]
        if index < self.next:
            raise AttachError(
                f"the gradient of {name!r} came a second time in one backward, after it was sent; "
                "with reentrant checkpointing use use_reentrant=False, and accumulate under comm.no_sync()"
            )
        if gradient.requires_grad:  # under create_graph=True it has a history that must not grow into the buffer
            gradient = gradient.detach()
        slot.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        if name not in self.arrived:
            self.arrived.add(name)
            self.missing[index] -= 1
            if not self.missing[index]:
                self._launch_full()

    def finish(self) -> list[str]:
        """Backward is over: parameters it did not reach send what they have, or zero. Returns their names."""
        unused = [name for name in self.slots if name not in self.arrived]
        for name in unused:
            param = self.worker.params[name]
            grad = param.gradient if param.trains else None  # frozen since: it is left alone
            self.take(name, torch.zeros_like(self.slots[name][1]) if grad is None else grad)
        self._launch_full()
        return unused

    def _launch_full(self) -> None:
        while self.next < len(self.missing) and self.missing[self.next] == 0:
            self.next += 1
            self.launch(self.next - 1, self.flats[self.next - 1])
