"""The moments of a measured step: by the host's clock on a CPU, by stream events on a GPU, where calls return early."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch

from gossamer.core.stream_events import DeviceMoment


@dataclass
class StepMoments:
    """A step from `start` to `end`; its last backward pass is the one whose gradients are averaged."""

    device: torch.device
    start: DeviceMoment
    gradients: dict[str, DeviceMoment] = field(default_factory=dict[str, DeviceMoment])  # by parameter

    def __post_init__(self) -> None:
        self.began = self.ended = self.end = self.start

    @property
    def has_backward(self) -> bool:
        return self.ended is not self.start

    def begin_backward(self) -> None:
        self.gradients.clear()
        self.began = now(self.device)

    def end_backward(self) -> None:
        self.ended = now(self.device)

    def note(self, name: str) -> None:
        self.gradients[name] = now(self.device)

    def finish(self) -> None:
        self.end = now(self.device)

    @property
    def pieces(self) -> tuple[float, float, float]:
        """Seconds before the backward pass, in it, and after it."""
        moments = self.start, self.began, self.ended, self.end
        before, backward, after = (_seconds(a, b) for a, b in pairwise(moments))
        return before, backward, after

    def share(self, name: str) -> float:
        """How much of the backward pass is over when a gradient is there; all of it for one that does not come."""
        came = self.gradients.get(name, self.ended)
        return min(_seconds(self.began, came) / max(_seconds(self.began, self.ended), 1e-9), 1.0)


def now(device: torch.device) -> DeviceMoment:
    return DeviceMoment(device, perf_counter())


def measured_on(device: torch.device) -> str:
    """Where a step was measured, in words."""
    return "on this machine's GPU" if device.type == "cuda" else "on this machine"


def _seconds(since: DeviceMoment, until: DeviceMoment) -> float:
    return max(until.seconds_since(since), 0.0)


def medians(steps: Sequence[StepMoments], names: Iterable[str]) -> dict[str, Any]:
    """The cost of a typical step, as fields of a `ModelCost`. Waits until the device has done them all."""
    forward, backward, optimizer = (median(column) for column in zip(*(step.pieces for step in steps)))
    shares = {name: median(step.share(name) for step in steps) for name in names}
    return {"forward": forward, "backward": backward, "optimizer": optimizer, "shares": shares}
