"""Strom's threshold: send the sign of each element whose magnitude reaches a threshold."""

from typing import Annotated, final

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Biased, Codec, Context
from gossamer.core.errors import WireError
from gossamer.core.parts import part, require
from gossamer.core.ranges import LogRange
from gossamer.core.wire import expect, pack, take
from gossamer.kernels.finite import peak

_WORD = 4  # bytes of a place and its sign


@final
@part("strom", sample="strom(threshold=0.5)")
class Strom(Biased, Codec):
    """Send each element of |x| >= t as sign(x) t; the rest stays in the memory.

    With error feedback an element of gradient g moves by t every t / |g| steps. Gradients above t per step accumulate in the
    residual without bound: t must be larger than they usually are. Biased: error feedback is needed. A loss scale changes
    nothing, since the threshold is multiplied by it too.

    Use: with a threshold found by trials: the number of bytes follows the gradients, and falls as they do. A word of four bytes
    holds index and sign, half of what `topk` needs per element.

    Not for: GPUs: the host must know the length of a message in advance. Nor with an untested threshold: a tenth of the right one
    sends nearly everything, ten times it waits for ten times as many steps.

    Wire: 4 bytes for the number of elements, 4 of float32 threshold, and 4 of index and sign for each element; lengths depend on
    the data, and cost one more small gather.

    >>> from gossamer.core.rng import CounterRng
    >>> block = Bucket.of({"w": torch.tensor([0.1, -3.0, 0.2, 2.0])})
    >>> codec = Strom(threshold=2.0)
    >>> wire = codec.encode(block, {}, Context(0, 1, 0, CounterRng(0, 0, 0)))
    >>> wire.numel(), codec.decode(wire, block)
    (16, tensor([ 0., -2.,  0.,  2.]))

    Paper: Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, Interspeech 2015.
    """

    threshold: Annotated[float, LogRange(0.0001, 1.0)]

    def __post_init__(self) -> None:
        require(
            0 < self.threshold < float("inf"),
            f"strom: threshold must be above 0, got {self.threshold}; try the size of the largest one percent of a gradient",
        )

    @property
    def any_size(self) -> bool:
        return False

    @property
    def own_size(self) -> bool:
        return True

    def wire_bytes(self, layout: Layout) -> int | None:
        return None

    def wire_limit(self, layout: Layout) -> int:
        return _WORD * (2 + layout.numel)

    def encode(self, block: Bucket, state: State, context: Context) -> Tensor:
        flat, quantum = block.flat.float(), self.threshold * context.scale
        places = (~(flat.abs() < quantum)).nonzero().view(-1)  # what is no number travels as well
        words = torch.where(flat[places] < 0, ~places, places)  # the sign of a place is its element's
        head = (peak(flat) * 0 + quantum).float().view(1)  # NaN if the bucket holds NaN or inf
        return pack(torch.tensor([len(places)], dtype=torch.int32, device=flat.device), head, words.int())

    def accumulate(self, wire: Tensor, layout: Layout, into: Tensor, weight: float) -> None:
        count, rest = take(wire, torch.int32, 1)
        head, rest = take(rest, torch.float32, 1)
        if not 0 <= int(count) <= layout.numel:
            raise WireError(f"strom: the message announces {int(count)} of {layout.numel} elements")
        expect(rest, _WORD * int(count), "strom")
        words = take(rest, torch.int32, int(count))[0].long()
        places = torch.where(words < 0, ~words, words)
        if len(places) and int(places.max()) >= layout.numel:
            raise WireError(f"strom: an index lies outside [0, {layout.numel})")
        values = torch.where(words < 0, -head, head).to(into.dtype)
        into.index_add_(0, places, values, alpha=weight)
