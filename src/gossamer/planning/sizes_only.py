"""Exchanges with codecs that only compute sizes: the same requests without encoding."""

from dataclasses import dataclass, fields, replace
from typing import ClassVar, TypeVar, get_type_hints

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import AsItsCodec, Codec, Context, Exchange, LinearCodec, ReduceResult
from gossamer.core.parts import Part
from gossamer.core.verbs import Program, all_reduce

P = TypeVar("P", bound=Part)


@dataclass(frozen=True, repr=False)
class SizesOnly(AsItsCodec, Codec):
    """Stands in for a codec, with wires of the same length and no content."""

    name: ClassVar[str] = "sizes_only"

    codec: Codec

    def omega(self, layout: Layout) -> float:
        return self.codec.omega(layout)

    def wire_bytes(self, layout: Layout) -> int | None:
        return self.codec.wire_bytes(layout)

    def wire_limit(self, layout: Layout) -> int:
        return self.codec.wire_limit(layout)

    def encode(self, block: Bucket, state: State, context: Context) -> Tensor:
        length = self.wire_bytes(block.layout)
        if length is None:  # it depends on the data, so run the codec itself
            return self.codec.encode(block, state, context)
        return torch.empty(length, dtype=torch.uint8, device=block.flat.device)

    def accumulate(self, wire: Tensor, layout: Layout, into: Tensor, weight: float) -> None:
        pass


@dataclass(frozen=True, repr=False)
class SizesOnlySum(AsItsCodec, LinearCodec):
    """Stands in for a codec whose messages are summed; a codec that does not know their lengths runs itself."""

    name: ClassVar[str] = "sizes_only_sum"

    codec: LinearCodec

    def omega(self, layout: Layout) -> float:
        return self.codec.omega(layout)

    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        lengths = self.codec.sum_bytes(block.layout, context.size)
        if lengths is None:
            return (yield from self.codec.average(block, state, context))
        for length in lengths:
            yield from all_reduce(torch.empty(length, dtype=torch.uint8, device=block.flat.device))
        return ReduceResult(block.flat, lambda into, weight: None)


def sizes_only(part: P) -> P:
    """The same part with codecs that only compute sizes."""
    hints, changed = get_type_hints(type(part)), dict[str, Part]()
    for f in fields(part):  # pyright: ignore[reportArgumentType]
        value = getattr(part, f.name)
        if hints[f.name] in (Codec, Codec | None) and isinstance(value, Codec):
            changed[f.name] = SizesOnly(value)
        elif hints[f.name] is LinearCodec:
            changed[f.name] = SizesOnlySum(value)
        elif isinstance(value, Exchange):
            changed[f.name] = sizes_only(value)
    return replace(part, **changed)  # pyright: ignore[reportArgumentType, reportCallIssue]
