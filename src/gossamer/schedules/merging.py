"""What is made of how far several learners have come: their mean, or that of their directions and of their lengths apart."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, Layout

TINY = 1e-12  # directions whose mean is no longer cancel each other


class Merge(NamedTuple):
    """A weighted mean; if it is `radial`, that of each tensor's direction v / |v|, as long as the mean of |v| says.

    Tensors whose names fit one of the `plain` patterns are averaged as they are. Where directions cancel, nothing moves.
    """

    radial: bool
    plain: Sequence[str]

    def given(self, moved: Tensor, layout: Layout) -> Tensor:
        """What a rank gives to the mean."""
        for view in self._turned(moved, layout):
            length = view.norm()
            view.div_(torch.where(length > 0, length, 1.0))
        return moved

    def lengths(self, moved: Tensor, layout: Layout) -> Tensor:
        """How long each tensor is that is not averaged as it is."""
        views = self._turned(moved, layout)
        return torch.stack([v.double().norm() for v in views]) if views else moved[:0].double()

    def made(self, mean: Tensor, layout: Layout, lengths: Tensor) -> Tensor:
        """The mean, each of its tensors as long as those that it is made of are on average."""
        for view, length in zip(self._turned(mean, layout), lengths):
            now = view.double().norm()
            view.mul_(torch.where(now > TINY, length / now, 0.0).to(view.dtype))
        return mean

    def _turned(self, flat: Tensor, layout: Layout) -> list[Tensor]:
        if not self.radial:
            return []
        views = Bucket(flat, layout).tensors()
        return [v for name, v in views if v.numel() and not any(fnmatchcase(name, p) for p in self.plain)]
