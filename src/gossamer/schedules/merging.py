"""How the progress of several ranks is merged, and how the anchor follows ranks that arrive one by one."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.loop import BucketView
from gossamer.schedules.rounds import slow_velocity

TINY = 1e-12  # a mean of unit directions that is shorter counts as 0


class Merge(NamedTuple):
    """A weighted mean of tensors; if `radial`, the mean of directions v / |v|, scaled to the mean of |v|.

    Tensors with a name that matches one of the `plain` patterns get the plain mean. If directions cancel, the result is 0.
    """

    radial: bool
    plain: Sequence[str]

    def given(self, moved: Tensor, layout: Layout) -> Tensor:
        """Return a rank's input to the mean: directions if radial. Written over `moved`."""
        for view in self._turned(moved, layout):
            length = view.norm()
            view.div_(torch.where(length > 0, length, 1.0))
        return moved

    def lengths(self, moved: Tensor, layout: Layout) -> Tensor:
        """Return the norm of each tensor whose direction is averaged."""
        views = self._turned(moved, layout)
        return torch.stack([v.double().norm() for v in views]) if views else moved[:0].double()

    def made(self, mean: Tensor, layout: Layout, lengths: Tensor) -> Tensor:
        """Scale each averaged direction to the mean length. Written over `mean`."""
        for view, length in zip(self._turned(mean, layout), lengths):
            now = view.double().norm()
            view.mul_(torch.where(now > TINY, length / now, 0.0).to(view.dtype))
        return mean

    def _turned(self, flat: Tensor, layout: Layout) -> list[Tensor]:
        if not self.radial:
            return []
        views = Bucket(flat, layout).tensors()
        return [v for name, v in views if v.numel() and not any(fnmatchcase(name, p) for p in self.plain)]


class DelayedNesterov(NamedTuple):
    """The rule by which an anchor follows arrivals D, of which every N-th moves the velocity; N is the number of ranks.

    s += D / N;  at the N-th arrival  v = beta v + s, s = 0, a -= alpha (D / N + (1 - c (N - 1)) beta v), and at the others
    a -= alpha (D / N + c beta v). A mean over k ranks counts as k arrivals, so the mean over all N is one step of `OuterStep`
    with Nesterov momentum, bit for bit if c = 0.
    """

    beta: float
    alpha: float
    share: float  # c

    def take(self, bucket: BucketView, mean: Tensor, arrivals: int, size: int) -> None:
        """Move one bucket's anchor by the mean over `arrivals` of `size` ranks."""
        state = bucket.states["schedule"]
        counted = arrivals_since(state)
        while arrivals:
            now = min(arrivals, max(size - counted, 1))  # after a loss more may be counted than there are ranks
            is_last = counted + now >= size
            self._follow(bucket, mean, now, size, is_last)
            arrivals, counted = arrivals - now, 0 if is_last else counted + now
        state["arrivals"] = torch.tensor(float(counted), dtype=torch.float64)

    def _follow(self, bucket: BucketView, mean: Tensor, arrivals: int, size: int, is_last: bool) -> None:
        """Move the anchor by arrivals between two moves of the velocity; `is_last` is True if they include the N-th."""
        state, buffers = bucket.states["schedule"], bucket.layout.buffers
        step = torch.mul(mean, arrivals / size, out=buffers.like(mean))
        room = buffers.like(mean)
        arrived = torch.add(state["arrived"], step, out=room) if "arrived" in state else room.copy_(step)
        if self.share and "velocity" in state:
            step.add_(state["velocity"], alpha=self.share * self.beta * (arrivals - is_last))
        if is_last:
            velocity = slow_velocity(state, arrived, 1.0, self.beta, by_lr=False)
            step.add_(velocity, alpha=(1 - self.share * (size - 1)) * self.beta)
        state["arrived"] = buffers.like(arrived).zero_() if is_last else arrived
        state["anchor"] = torch.sub(state["anchor"], step.mul_(self.alpha), out=step)


def arrivals_since(state: State) -> int:
    """Return the number of arrivals since the velocity moved last."""
    return int(state["arrivals"]) if "arrivals" in state else 0
