"""What several codecs have in common."""

from abc import abstractmethod

import torch
from torch import Tensor

from gossamer.core.bucket import Layout
from gossamer.core.contracts import Codec


class Unbiased:
    """A codec whose decoding is right on average: `class MyCodec(Unbiased, Codec)`, with its variance as `omega`."""

    @property
    def unbiased(self) -> bool:
        return True


class FewBytes:
    """A codec of messages so short that a bucket costs its latency and its turn on the processor: so buckets are large."""

    @property
    def bucket_mb(self) -> float:
        return 25.0


class SingleCodec(Codec):
    """A codec that decodes to float32; for a model in double precision the decoded numbers are converted, then weighted."""

    @abstractmethod
    def read(self, wire: Tensor, layout: Layout, out: Tensor, weight: float | None = None) -> None:
        """out = the decoded wire, in float32; with a weight out += weight times that."""

    def overwrite(self, wire: Tensor, layout: Layout, out: Tensor) -> None:
        if out.dtype == torch.float32:
            self.read(wire, layout, out)
        else:
            out.copy_(self._decoded(wire, layout))

    def accumulate(self, wire: Tensor, layout: Layout, into: Tensor, weight: float) -> None:
        if into.dtype == torch.float32:
            self.read(wire, layout, into, weight)
        else:  # weighted in double, or what a memory keeps would be right to single precision only
            into.add_(self._decoded(wire, layout), alpha=weight)

    def _decoded(self, wire: Tensor, layout: Layout) -> Tensor:
        out = torch.empty(layout.numel, device=wire.device, dtype=torch.float32)
        self.read(wire, layout, out)
        return out
