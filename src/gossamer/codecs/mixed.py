"""One bucket, several codecs of one kind: a controller chooses the codec of each parameter."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar, cast, final

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import AsItsCodec, Codec, CodecExchange, Context, Exchange, Levelled
from gossamer.core.errors import WireError
from gossamer.core.parts import Part
from gossamer.core.wire import expect, take

E = TypeVar("E", bound=Exchange)
_LENGTH = 8  # bytes that say how long a wire is, where that depends on the data


@final
@dataclass(frozen=True, repr=False)
class Mixed(AsItsCodec, Codec):
    """A codec for a bucket whose layout sets the codec of each segment (`Layout.knobs`).

    Adjacent segments with one codec are encoded together. So where all have the same codec, it equals that codec, bit for bit.
    Not registered, since no recipe names it: recipes have routes, and `runtime` makes this codec from them.

    Wire: the messages of the runs end to end; before them, if any length depends on the data, 8 bytes per run for its length.
    """

    name: ClassVar[str] = "mixed"

    codec: Codec

    def omega(self, layout: Layout) -> float:
        return max((codec.omega(run) for codec, run, _ in layout.runs), default=0.0)

    def wire_bytes(self, layout: Layout) -> int | None:
        lengths = [codec.wire_bytes(run) for codec, run, _ in layout.runs]
        return None if None in lengths else sum(n or 0 for n in lengths)

    def wire_limit(self, layout: Layout) -> int:
        fixed = self.wire_bytes(layout)
        return sum(_LENGTH + codec.wire_limit(run) for codec, run, _ in layout.runs) if fixed is None else fixed

    def encode(self, block: Bucket, state: State, context: Context) -> Tensor:
        wires = [codec.encode(_of(block.flat, run, at), state, context) for codec, run, at in block.layout.runs]
        if self.wire_bytes(block.layout) is None:
            lengths = torch.tensor([w.numel() for w in wires], dtype=torch.int64, device="cpu")
            wires.insert(0, lengths.view(torch.uint8).to(block.flat.device))
        return wires[0] if len(wires) == 1 else torch.cat(wires)

    def overwrite(self, wire: Tensor, layout: Layout, out: Tensor) -> None:
        for (codec, run, at), piece in self._open(wire, layout):
            codec.overwrite(piece, run, out[at : at + run.numel])

    def accumulate(self, wire: Tensor, layout: Layout, into: Tensor, weight: float) -> None:
        for (codec, run, at), piece in self._open(wire, layout):
            codec.accumulate(piece, run, into[at : at + run.numel], weight)

    def scales(self, wire: Tensor, layout: Layout) -> Tensor | None:
        found = [codec.scales(piece, run) for (codec, run, _), piece in self._open(wire, layout)]
        said = [s for s in found if s is not None]
        return torch.cat(said) if said and len(said) == len(found) else None

    def _open(self, wire: Tensor, layout: Layout) -> Iterator[tuple[Any, Tensor]]:
        runs, fixed = layout.runs, self.wire_bytes(layout)
        if fixed is None:
            said, wire = take(wire, torch.int64, len(runs))
            lengths: Sequence[int] = said.tolist()
            limits = [codec.wire_limit(run) for codec, run, _ in runs]
            if not all(0 <= n <= most for n, most in zip(lengths, limits)):
                raise WireError(f"mixed: the wire says that its pieces are {lengths[:8]} bytes long; it was damaged")
        else:
            lengths = [codec.wire_bytes(run) for codec, run, _ in runs]
        expect(wire, sum(lengths), "mixed")
        yield from zip(runs, wire.split(list(lengths)))


def _of(flat: Tensor, run: Layout, at: int) -> Bucket:
    return Bucket(flat[at : at + run.numel], run)


def levelled(exchange: Exchange) -> Levelled | None:
    """The exchange's codec with evenly spaced levels, if it has exactly one; else None."""
    found = list(_levelled(exchange))
    return found[0] if len(found) == 1 else None


def _levelled(part: object) -> Iterator[Levelled | None]:
    """Yield the codecs with evenly spaced levels of a part's exchanges, after None if messages use another codec."""
    if isinstance(part, CodecExchange):
        codecs = [c.codec if isinstance(c, Mixed) else c for c in vars(part).values() if isinstance(c, Codec)]
        found = [c for c in codecs if isinstance(c, Levelled)]
        yield from [None, *found] if found and found[0] is not codecs[0] else found
    elif isinstance(part, Part):
        for value in vars(part).values():
            yield from _levelled(value)


def written_by(exchange: E, codec: Codec) -> E:
    """The same exchange with this codec in place of the one with levels."""
    return _replaced(exchange, lambda part: codec if isinstance(part, Levelled) else None)


def mixed(exchange: E) -> E:
    """The same exchange, with the codec of each parameter set by its layout."""
    return _replaced(exchange, lambda part: Mixed(part) if isinstance(part, Levelled) else None)


P = TypeVar("P", bound=Part)


def _replaced(part: P, by: Callable[[Part], Part | None]) -> P:
    """The same part, with each inner part replaced for which `by` returns another one."""
    changed = dict[str, Any]()
    for name, value in vars(part).items():
        if isinstance(value, Part):
            new = by(value) or _replaced(value, by)
            if new is not value:
                changed[name] = new
    return replace(cast("Any", part), **changed) if changed else part
