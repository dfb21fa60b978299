"""Gather: every rank receives every rank's message."""

from typing import final

from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Codec, CodecExchange, Context, ReduceResult
from gossamer.core.parts import part, require
from gossamer.core.verbs import Program, all_gather, all_gather_ragged, once


@final
@part("gather", sample="gather(fp32())")
class Gather(CodecExchange):
    """All-gather the encoded messages, decode all of them, sum in rank order.

    Wire: (N-1) messages each way, so it beats a dense all-reduce only while a message is shorter than 8 d / N bytes.

    Use: for sparse messages, for two ranks, and where the mean must not be encoded a second time.

    Not for: many ranks: the bytes grow with their number.

    >>> from gossamer.codecs import QSGD
    >>> Gather(QSGD(bits=2))
    gather(qsgd(bits=2))
    """

    codec: Codec

    def __post_init__(self) -> None:
        require(
            isinstance(self.codec, Codec),  # pyright: ignore[reportUnnecessaryIsInstance]
            f"gather({self.codec}): of {self.codec.name}'s messages only their sum can be read, not one alone; "
            f"use allreduce({self.codec})",
        )

    @property
    def sparse(self) -> bool:
        return self.codec.sparse

    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        codec, layout = self.codec, block.layout
        wire = codec.encode(block, state, context)
        if codec.wire_bytes(layout) is None:
            wires = yield from all_gather_ragged(wire, codec.wire_limit(layout))
        else:
            wires = yield from all_gather(wire)
        mean = block.for_mean()
        key = codec, layout.segments, layout.knobs, mean.dtype
        largest = once(wires, key, mean, lambda: codec.mean(wires, layout, mean))

        def add_sent(into: Tensor, weight: float) -> None:
            codec.accumulate(wire, layout, into, weight)

        return ReduceResult(mean, add_sent, largest)
