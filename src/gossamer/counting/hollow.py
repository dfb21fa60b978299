"""Exchanges whose codecs write nothing: the same requests, and no work."""

from dataclasses import dataclass, fields, replace
from typing import ClassVar, TypeVar, get_type_hints

import torch
from torch import Tensor

from gossamer.core.block import Block, Layout, State
from gossamer.core.contracts import AsItsCodec, Codec, Exchange, Seat
from gossamer.core.parts import Part

P = TypeVar("P", bound=Part)


@dataclass(frozen=True, repr=False)
class Hollow(AsItsCodec, Codec):
    """Stands in for a codec: its wires are as long, and nobody has written or reads them."""

    name: ClassVar[str] = "hollow"

    codec: Codec

    def wire_bytes(self, layout: Layout) -> int | None:
        return self.codec.wire_bytes(layout)

    def wire_limit(self, layout: Layout) -> int:
        return self.codec.wire_limit(layout)

    def encode(self, block: Block, state: State, seat: Seat) -> Tensor:
        length = self.wire_bytes(block.layout)
        if length is None:  # it depends on the data, so it takes the codec itself
            return self.codec.encode(block, state, seat)
        return torch.empty(length, dtype=torch.uint8)

    def accumulate(self, wire: Tensor, layout: Layout, into: Tensor, weight: float) -> None:
        pass


def hollow(part: P) -> P:
    """The same exchange around hollow codecs. Codecs that are summed on their way run as they are."""
    hints, changed = get_type_hints(type(part)), dict[str, Part]()
    for f in fields(part):  # pyright: ignore[reportArgumentType]
        value = getattr(part, f.name)
        if hints[f.name] is Codec:
            changed[f.name] = Hollow(value)
        elif isinstance(value, Exchange):
            changed[f.name] = hollow(value)
    return replace(part, **changed)  # pyright: ignore[reportArgumentType, reportCallIssue]
