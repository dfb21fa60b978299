"""SparseLoCo's codec: the top-k elements of each tile, in 2 bits each."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, final

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.codecs.base import FewBytes
from gossamer.codecs.tiles import TiledParameter, check_side, largest, pieces, spread
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Biased, Codec, Context
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice
from gossamer.core.wire import expect, pack, take

BINS, WIDTH = 4, 1.5  # bins of so many standard deviations, the third of them around the mean


@final
@part("tile_topk")
class TileTopK(Biased, FewBytes, Codec):
    """Send the `keep` elements of largest magnitude of every tile of `side` by `side`, in 2 bits each.

    With mean m and standard deviation s of a tensor's kept values, each value goes into one of four bins of 1.5 s, around
    m - 3 s, m - 1.5 s, m and m + 1.5 s, and is decoded as the mean of its bin. So |x - C(x)|^2 < |x|^2, and the residual keeps
    the rounding error. Vectors have tiles of as many elements; a smaller tensor is one tile. `bits=32` sends values unrounded.

    Use: for pseudo-gradients under error_feedback(decay=0.95), as the preset `sparse_loco` does: messages are 206 times shorter
    (a Transformer of 5.8 million parameters).

    Not for: gradients at every step, whose values four bins represent badly: use topk(). `places="rice"` is for slow links and CPUs:
    on a GPU the host does not know the length of a message in advance.

    Wire: per kept element 2 bits of value and its place, and 16 bytes per tensor. With the default a place of a full tile has 7.6 bits
    (7.4 are a bound for places as if drawn at random), and a tile 77 bytes. `places="rice"` writes the gaps between places in a Rice
    code that adapts: as many bits where places are as if drawn, and fewer where they cluster; lengths then depend on the data, and
    cost one more small gather.

    >>> from gossamer.core.rng import CounterRng
    >>> block, codec = Bucket.of({"w": torch.tensor([0.1, 4.0, 0.2, -4.0])}), TileTopK(keep=2)
    >>> codec.decode(codec.encode(block, {}, Context(0, 1, 0, CounterRng(0, 0, 0))), block)
    tensor([ 0.,  4.,  0., -4.])

    Paper: Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, 2025.
    """

    keep: Annotated[int, Choice(16, 32, 64, 128)] = 64
    side: Annotated[int, Choice(16, 32, 64)] = 64
    bits: Literal[2, 32] = 2
    places: Literal["fixed", "rice"] = "fixed"

    def __post_init__(self) -> None:
        require(self.keep >= 1, f"tile_topk: keep must be at least 1 element of a tile, got {self.keep}; 64 is usual")
        check_side("tile_topk", self.side)

    def wire_bytes(self, layout: Layout) -> int | None:
        return self._fixed_bytes(layout) if self.places == "fixed" else None

    def wire_limit(self, layout: Layout) -> int:
        if self.places == "fixed":
            return self._fixed_bytes(layout)
        cut = self._pieces(layout)
        return self._value_bytes(cut) + 4 * sum(p.kept for p in cut) + 1  # the code falls back to int32 behind a byte

    def encode(self, block: Bucket, state: State, context: Context) -> Tensor:
        flat, places = block.flat.float(), list[Tensor]()
        numbers, codes = list[Tensor](), list[Tensor]()
        cut = self._pieces(block.layout)
        for tiles, keep, own in cut:
            where, what = largest(tiles.apart(flat[own]), keep)
            places.append(where)
            if self.bits == 2:
                means, bins = _binned(what.view(-1))
                numbers.append(means)
                codes.append(_pack(bins))
            else:
                numbers.append(what.view(-1))
        if not places:
            return flat.new_empty(0, dtype=torch.uint8)
        return pack(torch.cat(numbers), *codes, *self._write_places(cut, places))

    def accumulate(self, wire: Tensor, layout: Layout, into: Tensor, weight: float) -> None:
        cut = self._pieces(layout)
        if self.places == "fixed" or not cut:
            expect(wire, self._fixed_bytes(layout), "tile_topk")
        numbers, rest = take(wire, torch.float32, self._numbers(cut))
        codes, rest = take(rest, torch.uint8, self._code_bytes(*cut))
        for piece, places in zip(cut, self._read_places(cut, rest), strict=True):
            count = BINS if self.bits == 2 else piece.kept
            values, numbers = numbers[:count], numbers[count:]
            if self.bits == 2:
                length = self._code_bytes(piece)
                values, codes = values[_unpack(codes[:length], piece.kept)], codes[length:]
            tiles = piece.tiles
            read = tiles.together(spread(places, values.view(tiles.total, -1), tiles.places))
            into[piece.own].add_(read.to(into.dtype), alpha=weight)

    def _write_places(self, cut: Sequence[TiledParameter], places: list[Tensor]) -> list[Tensor]:
        if self.places == "fixed":
            return [kernels.places_encode(where, p.tiles.places) for p, where in zip(cut, places, strict=True)]
        starts, end = _starts(cut, places[0].device)
        numbered = [(where + start).view(-1) for where, start in zip(places, starts, strict=True)]
        return [kernels.index_encode(torch.cat(numbered).int(), end)]

    def _read_places(self, cut: Sequence[TiledParameter], wire: Tensor) -> Iterator[Tensor]:
        if self.places == "fixed":
            for p in cut:
                coded, wire = wire[: p.place_bytes], wire[p.place_bytes :]
                yield kernels.places_decode(coded, p.tiles.total, p.keep, p.tiles.places)
            return
        starts, end = _starts(cut, wire.device)
        numbered = kernels.index_decode(wire, sum(p.kept for p in cut), end).long()
        for p, start in zip(cut, starts, strict=True):
            mine, numbered = numbered[: p.kept].view(-1, p.keep) - start, numbered[p.kept :]
            if bool(((mine < 0) | (mine >= p.tiles.places)).any()):
                raise kernels.CorruptWire(f"tile_topk: a tile does not have {p.keep} places")
            yield mine

    def _fixed_bytes(self, layout: Layout) -> int:
        cut = self._pieces(layout)
        return self._value_bytes(cut) + sum(p.place_bytes for p in cut)

    def _value_bytes(self, cut: Sequence[TiledParameter]) -> int:
        return 4 * self._numbers(cut) + self._code_bytes(*cut)

    def _numbers(self, cut: Sequence[TiledParameter]) -> int:
        return sum(BINS if self.bits == 2 else p.kept for p in cut)

    def _code_bytes(self, *cut: TiledParameter) -> int:
        return sum((p.kept + 3) // 4 for p in cut) if self.bits == 2 else 0

    def _pieces(self, layout: Layout) -> tuple[TiledParameter, ...]:
        return pieces(layout.segments, self.keep, self.side, self.side**2)


def _starts(cut: Sequence[TiledParameter], device: torch.device) -> tuple[list[Tensor], int]:
    """The number of each tile's first place, where those of all tiles are counted on, and of all places."""
    starts, end = list[Tensor](), 0
    for tiles in (p.tiles for p in cut):
        numbers = torch.arange(tiles.total, device=device)
        starts.append((end + tiles.places * numbers)[:, None])
        end += tiles.total * tiles.places
    return starts, end


def _binned(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of each bin, and the bin of each value."""
    size = values.abs().max()
    unit = values / torch.where(size > 0, size, torch.ones_like(size))  # squares of what is tiny would be nothing
    apart = unit - unit.mean()
    deviation = apart.square().mean().sqrt()
    steps = torch.where(deviation > 0, apart / (WIDTH * deviation), torch.zeros_like(apart))
    bins = steps.nan_to_num(0.0).round().clamp(-2, 1).long() + 2
    members = (bins[:, None] == torch.arange(BINS, device=bins.device)).to(unit.dtype)
    means = (unit[:, None] * members).sum(0) / members.sum(0).clamp(min=1) * size
    return means, bins


def _pack(bins: Tensor) -> Tensor:
    quads = torch.nn.functional.pad(bins, (0, -bins.numel() % 4)).view(-1, 4)
    return (quads << torch.arange(0, 8, 2, device=bins.device)).sum(1).to(torch.uint8)


def _unpack(codes: Tensor, count: int) -> Tensor:
    shifted = codes.long()[:, None] >> torch.arange(0, 8, 2, device=codes.device)
    return (shifted & 3).view(-1)[:count]
