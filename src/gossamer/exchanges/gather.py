"""Gather: every rank receives every rank's message."""

from collections.abc import Sequence
from math import inf
from typing import final

import torch
from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.constraints import Constraint, excludes
from gossamer.core.contracts import Codec, CodecExchange, Context, ReduceResult
from gossamer.core.errors import AttachError
from gossamer.core.parts import part, require
from gossamer.core.verbs import Program, all_gather, all_gather_ragged
from gossamer.core.wire import once
from gossamer.exchanges.robust import RobustMean, robust_mean

ROBUST = (
    excludes(
        "memory",
        because="{memory} around {exchange}: a robust mean leaves values out that no memory keeps; leave the memory out",
    ),
    excludes(
        "is async",
        "waits for few",
        because="{exchange} under {schedule}: late ranks send zeros, which a robust mean takes for values; use a schedule in which "
        "all ranks send, such as every_step() or local_sgd(8)",
    ),
)


@final
@part("gather", sample="gather(fp32())")
class Gather(CodecExchange):
    """All-gather the encoded messages, decode all of them, sum in rank order.

    Wire: (N-1) messages each way, so it beats a dense all-reduce only while a message is shorter than 8 d / N bytes.

    Use: for sparse messages, for two ranks, and where the mean must not be encoded a second time.

    Not for: many ranks: the bytes grow with their number.

    With `mean` a robust mean stands in place of the mean: median(), trimmed(count) or clipped(tau). Wrong messages of a few
    ranks then do no harm, and a message that is not finite is left out, where otherwise all ranks skip the step. It is biased
    where ranks differ, and refuses memories, ranks' weights, schedules in which some ranks send nothing, and codecs that send
    some elements only.

    >>> from gossamer.codecs import QSGD
    >>> Gather(QSGD(bits=2))
    gather(qsgd(bits=2))
    >>> from gossamer.exchanges import Trimmed
    >>> Gather(QSGD(), mean=Trimmed(1))
    gather(qsgd(), mean=trimmed(1))
    """

    codec: Codec
    mean: RobustMean | None = None

    def __post_init__(self) -> None:
        require(
            isinstance(self.codec, Codec),  # pyright: ignore[reportUnnecessaryIsInstance]
            f"gather({self.codec}): of {self.codec.name}'s messages only their sum can be read, not one alone; "
            f"use allreduce({self.codec})",
        )
        require(
            self.is_plain or not self.codec.sparse,
            f"gather({self.codec}, mean={self.mean}): ranks send different elements and the others count as 0, so that the "
            f"result would be near 0 everywhere; use a codec that sends all elements, or gather({self.codec})",
        )

    @property
    def is_plain(self) -> bool:
        """True if the result is the plain mean of all messages."""
        return self.mean is None or self.mean.plain

    @property
    def sparse(self) -> bool:
        return self.codec.sparse

    @property
    def unbiased(self) -> bool:
        return self.codec.unbiased and self.is_plain

    @property
    def exact(self) -> bool:
        return self.codec.exact and self.is_plain

    @property
    def votes(self) -> bool:
        return self.codec.votes or not self.is_plain

    def omega(self, layout: Layout, size: int) -> float:
        return super().omega(layout, size) if self.is_plain else inf

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        return super().constraints if self.is_plain else (*super().constraints, *ROBUST)

    def fits(self, binding: Binding) -> None:
        super().fits(binding)
        if self.mean is not None and not self.is_plain and 1 < binding.size < self.mean.least:
            raise AttachError(
                f"{self} on {binding.size} ranks: {self.mean} needs at least {self.mean.least}, or a wrong message cannot be told "
                f"from a right one; use more ranks, or gather({self.codec})"
            )

    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        codec, layout = self.codec, block.layout
        wire = codec.encode(block, state, context)
        if codec.wire_bytes(layout) is None:
            wires = yield from all_gather_ragged(wire, codec.wire_limit(layout))
        else:
            wires = yield from all_gather(wire)
        mean = block.for_mean()
        largest = self._combine(wires, layout, mean, state, context.scale)

        def add_sent(into: Tensor, weight: float) -> None:
            codec.accumulate(wire, layout, into, weight)

        return ReduceResult(mean, add_sent, largest)

    def _combine(
        self, wires: Sequence[Tensor], layout: Layout, out: Tensor, state: State, scale: float
    ) -> Tensor | None:
        """Write the mean of all messages to `out`; returns its largest magnitude where that costs nothing."""
        if self.mean is None or self.is_plain:
            key = self.codec, layout.segments, layout.knobs, out.dtype
            return once(wires, key, out, lambda: self.codec.mean(wires, layout, out))
        decoded = [torch.empty_like(out) for _ in wires]
        for wire, room in zip(wires, decoded, strict=True):
            self.codec.overwrite(wire, layout, room)
            room.div_(scale)  # `clipped()` compares lengths, which are those without the loss scale
        out.copy_(robust_mean(self.mean, decoded, state)).mul_(scale)
        return None
