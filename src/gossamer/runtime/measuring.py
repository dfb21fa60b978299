"""Measures the compression error of each parameter, now and then."""

from collections.abc import Callable

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket
from gossamer.core.loop import ErrorMeter


def relative_errors(block: Bucket, add_sent: Callable[[Tensor, float], None]) -> dict[str, float]:
    """The relative compression error |lost| / |input| of each parameter, with one transfer from the device."""
    lost = block.flat.clone()
    add_sent(lost, -1.0)
    names = [s.name for s in block.layout.segments]
    norms = torch.stack([t.norm() for b in (block, block.like(lost)) for _, t in b.tensors()]).tolist()
    pairs = zip(names, norms, norms[len(names) :])
    return {name: gone / given if given else 0.0 for name, given, gone in pairs}


class ErrorMeasurement:
    """When to measure compression errors, and the last errors."""

    def __init__(self) -> None:
        self.every = 0  # interval in steps; 0: never
        self.last = 0  # the step of the last measurement
        self.errors: dict[str, float] = {}  # relative compression error of each parameter, when last measured

    def meter(self, step: int, asked: bool = False) -> ErrorMeter | None:
        """What records the error of what starts at this step; None if it is not measured. Asked at the start, since an average
        may run at later steps.

        Measured is the first step at or after each multiple of `every` at which anything starts: rounds of local
        steps need not end at a multiple. Where a controller has asked for it, it is measured besides.
        """
        if self.every and step // self.every != self.last // self.every:
            self.last = step
        return self._record if asked or (self.every and step == self.last) else None

    def _record(self, block: Bucket, add_sent: Callable[[Tensor, float], None]) -> None:
        """Runs on the comm thread: other threads may read the old errors."""
        self.errors = self.errors | relative_errors(block, add_sent)
