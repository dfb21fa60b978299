"""All-reduce: messages that can be summed in encoded form."""

from typing import final

from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import CodecExchange, Context, LinearCodec, Policy, ReduceResult
from gossamer.core.parts import part, require
from gossamer.core.verbs import Program


@final
@part("allreduce", sample="allreduce(fp32())")
class AllReduced(CodecExchange):
    """One all-reduce of the encoded messages (or the few that the codec needs).

    Use: for codecs whose messages can be summed: dense, half precision, low rank, ternary on shared scales.

    Wire: 2 (N-1)/N of the codec's message each way: at most two messages, whatever N.

    >>> from gossamer.codecs import FP32
    >>> AllReduced(FP32())
    allreduce(fp32())
    """

    codec: LinearCodec

    def __post_init__(self) -> None:
        require(
            isinstance(self.codec, LinearCodec),  # pyright: ignore[reportUnnecessaryIsInstance]
            f"allreduce({self.codec}): messages of {self.codec.name} cannot be summed on their way; "
            f"use scatter({self.codec}) (bytes do not grow with N) or gather({self.codec})",
        )

    @property
    def sum_rounding(self) -> float:
        return self.codec.sum_rounding

    @property
    def adds_up(self) -> bool:
        return True

    def policy(self, key: str) -> Policy:
        return self.codec.policy(key)

    def omega(self, layout: Layout, size: int) -> float:
        """The relative variance of all ranks' tensors laid end to end.

        Scales are shared, so one rank's error has no bound by its own bucket: a small bucket is written in the levels of a
        large one. But the ranks' tensors of d elements are written just as one tensor of N d elements would be, scaled by
        the largest of all; so the sums over ranks obey that tensor's bound, and some buckets attain it.
        """
        end_to_end = Layout.of({s.name: (size, *s.shape) for s in layout.segments}, layout.dtype)
        return self.codec.omega(end_to_end)

    @property
    def sparse(self) -> bool:
        return self.codec.sparse

    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        return (yield from self.codec.average(block, state, context))
