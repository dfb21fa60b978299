"""How the progress of several ranks is merged: the mean, or the means of directions and of lengths."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, Layout

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
