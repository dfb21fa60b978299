"""Votes: -1, 0 or 1 for each element."""

from typing import final

import torch
from torch import Tensor

from gossamer.codecs.base import FewBytes
from gossamer.codecs.ternary import Ternary
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Biased, Codec, Context
from gossamer.core.parts import part

_TRITS = Ternary(clip=0.0)


@final
@part("vote")
class Vote(Biased, FewBytes, Codec):
    """The sign of each element, and 0 for 0: -1, 0 or 1, whatever the element's size.

    Under `scatter` the answer is the majority of the votes, and 0 where they tie; `sign('one')`, which has no zeros, tosses coins
    there.

    Use: for votes of an even number of ranks, or where many elements are exactly 0, as in unused rows of an embedding.

    Not for: anything but votes: sizes are lost, so only updates that take signs can follow.

    Wire: ceil(d / 5) bytes, and 4 per parameter.

    >>> from gossamer.core.rng import CounterRng
    >>> block = Bucket.of({"w": torch.tensor([3.0, -0.01, 0.0])})
    >>> wire = Vote().encode(block, {}, Context(0, 1, 0, CounterRng(0, 0, 0)))
    >>> wire.numel(), Vote().decode(wire, block)
    (5, tensor([ 1., -1.,  0.]))

    Paper: none; Bernstein et al., signSGD with Majority Vote, ICLR 2019, has votes without zeros.
    """

    @property
    def contracts(self) -> bool:
        return False

    @property
    def any_size(self) -> bool:
        return False

    @property
    def votes(self) -> bool:
        return True

    @property
    def own_size(self) -> bool:
        return True

    def wire_bytes(self, layout: Layout) -> int:
        return _TRITS.wire_bytes(layout)

    def encode(self, block: Bucket, state: State, context: Context) -> Tensor:
        signs = torch.sign(block.flat, out=block.new())
        # What is not finite has a sign, and must not look finite.
        signs.add_(torch.sub(block.flat, block.flat, out=block.new()))
        return _TRITS.encode(block.like(signs), state, context)

    def overwrite(self, wire: Tensor, layout: Layout, out: Tensor) -> None:
        _TRITS.overwrite(wire, layout, out)

    def accumulate(self, wire: Tensor, layout: Layout, into: Tensor, weight: float) -> None:
        _TRITS.accumulate(wire, layout, into, weight)

    def scales(self, wire: Tensor, layout: Layout) -> Tensor | None:
        return _TRITS.scales(wire, layout)
