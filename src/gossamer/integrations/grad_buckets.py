"""Gradient buckets: collect gradients during backward, and launch full buckets in a fixed order."""

from collections.abc import Callable

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket
from gossamer.core.errors import AttachError
from gossamer.core.memory_pool import holders
from gossamer.runtime import Worker


class GradBuckets:
    """Collects gradients into flat buffers; a bucket is launched when it and all buckets before it are full."""

    def __init__(self, worker: Worker, launch: Callable[[int, Tensor], None]) -> None:
        self.worker, self.launch = worker, launch
        self.flats = [bucket.empty() for bucket in worker.buckets]
        self.slots = dict[str, tuple[int, Tensor]]()
        for i in range(len(self.flats)):
            self._cut(i)
        self.sizes = [len(bucket.layout.segments) for bucket in worker.buckets]
        self._holders = [holders(flat) for flat in self.flats]
        self.reset()

    def reset(self) -> None:
        """Prepare for a backward pass; gradients that users still hold from the last pass are not overwritten."""
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
        """True if a reference to this buffer is held by anything but its parameters' gradients."""
        address = self.flats[i].untyped_storage().data_ptr()
        grads = [g for param in self.worker.buckets[i].params if (g := param.gradient) is not None]
        ours = sum(g.untyped_storage().data_ptr() == address for g in grads)
        return holders(self.flats[i]) > self._holders[i] + ours

    def view(self, name: str) -> Tensor:
        """Return a view of a parameter's gradient in its bucket; a new view each time, so that references can be counted."""
        slot = self.slots[name][1]
        return slot.view_as(slot)

    def take(self, name: str, gradient: Tensor) -> None:
        """Copy one parameter's gradient into its bucket."""
        index, slot = self.slots[name]
        if index < self.next:
            raise AttachError(
                f"the gradient of {name!r} was computed a second time in one backward, after it was sent; "
                "with reentrant checkpointing pass use_reentrant=False, and accumulate under comm.no_sync()"
            )
        if gradient.requires_grad:  # under create_graph=True: keep autograd history out of the buffer
            gradient = gradient.detach()
        slot.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        if name not in self.arrived:
            self.arrived.add(name)
            self.missing[index] -= 1
            if not self.missing[index]:
                self._launch_full()

    def finish(self) -> list[str]:
        """Complete all buckets: parameters without a new gradient send the one they have, or zero. Returns their names."""
        unused = [name for name in self.slots if name not in self.arrived]
        for name in unused:
            param = self.worker.params[name]
            grad = param.gradient if param.trains else None  # frozen since attach: send zero
            self.take(name, torch.zeros_like(self.slots[name][1]) if grad is None else grad)
        self._launch_full()
        return unused

    def _launch_full(self) -> None:
        while self.next < len(self.missing) and self.missing[self.next] == 0:
            self.next += 1
            self.launch(self.next - 1, self.flats[self.next - 1])
