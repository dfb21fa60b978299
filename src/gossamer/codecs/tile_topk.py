"""SparseLoCo's codec: the top-k elements of each tile, in 2 bits each."""

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple, final

import torch
from torch import Tensor

from gossamer.codecs.tiles import Tiling, check_side, largest, place_bytes, read_places, spread, tiling, write_places
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Codec, Context
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice
from gossamer.core.wire import expect, pack, take

BINS, WIDTH = 4, 1.5  # bins of so many standard deviations, the third of them around the mean


class _Piece(NamedTuple):
    tiles: Tiling
    kept: int  # elements of all its tiles
    own: slice  # of the bucket
    codes: int  # bytes of theirs


@final
@part("tile_topk")
class TileTopK(Codec):
    """Send the `keep` elements of largest magnitude of every tile of `side` by `side`, in 2 bits each.

    With mean m and standard deviation s of a tensor's kept values, each value goes into one of four bins of 1.5 s, around
    m - 3 s, m - 1.5 s, m and m + 1.5 s, and is decoded as the mean of its bin. So |x - C(x)|^2 < |x|^2, and the residual keeps
    the rounding error. Vectors have tiles of as many elements; a smaller tensor is one tile. `bits=32` sends values unrounded.

    Use: for pseudo-gradients under error_feedback(decay=0.95), as the preset `sparse_loco` does: messages are 146 times shorter.

    Not for: gradients at every step, whose values four bins represent badly: use topk().

    Wire: per kept element 12 bits of index and 2 bits of value, and 16 bytes per tensor: 112 bytes for a full tile.

    >>> from gossamer.core.rng import CounterRng
    >>> block, codec = Bucket.of({"w": torch.tensor([0.1, 4.0, 0.2, -4.0])}), TileTopK(keep=2)
    >>> codec.decode(codec.encode(block, {}, Context(0, 1, 0, CounterRng(0, 0, 0))), block)
    tensor([ 0.,  4.,  0., -4.])

    Paper: Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, 2025.
    """

    keep: Annotated[int, Choice(16, 32, 64, 128)] = 64
    side: Annotated[int, Choice(16, 32, 64)] = 64
    bits: Literal[2, 32] = 2

    def __post_init__(self) -> None:
        require(self.keep >= 1, f"tile_topk: keep must be at least 1 element of a tile, got {self.keep}; 64 is usual")
        check_side("tile_topk", self.side)

    @property
    def unbiased(self) -> bool:
        return False

    @property
    def bucket_mb(self) -> float:
        return 25.0

    def omega(self, layout: Layout) -> float:
        return float("inf")

    def wire_bytes(self, layout: Layout) -> int:
        pieces = [*self._pieces(layout)]
        return 4 * self._numbers(pieces) + sum(p.codes for p in pieces) + place_bytes(sum(p.kept for p in pieces))

    def encode(self, block: Bucket, state: State, context: Context) -> Tensor:
        flat, places = block.flat.float(), list[Tensor]()
        numbers, codes = list[Tensor](), list[Tensor]()
        for tiles, _, own, _ in self._pieces(block.layout):
            where, what = largest(tiles.apart(flat[own]), min(self.keep, tiles.places))
            places.append(where.view(-1))
            if self.bits == 2:
                means, bins = _binned(what.view(-1))
                numbers.append(means)
                codes.append(_pack(bins))
            else:
                numbers.append(what.view(-1))
        if not places:
            return flat.new_empty(0, dtype=torch.uint8)
        return pack(torch.cat(numbers), *codes, write_places(torch.cat(places)))

    def accumulate(self, wire: Tensor, layout: Layout, into: Tensor, weight: float) -> None:
        expect(wire, self.wire_bytes(layout), "tile_topk")
        pieces = [*self._pieces(layout)]
        numbers, rest = take(wire, torch.float32, self._numbers(pieces))
        coded = sum(p.codes for p in pieces)
        codes, places = rest[:coded], read_places(rest[coded:], sum(p.kept for p in pieces))
        at, of, code = 0, 0, 0
        for tiles, kept, own, length in pieces:
            if self.bits == 2:
                values = numbers[of : of + BINS][_unpack(codes[code : code + length], kept)]
            else:
                values = numbers[of : of + kept]
            where = places[at : at + kept].view(tiles.total, -1)
            read = tiles.together(spread(where, values.view(tiles.total, -1), tiles.places))
            into[own].add_(read.to(into.dtype), alpha=weight)
            at, of, code = at + kept, of + (BINS if self.bits == 2 else kept), code + length

    def _numbers(self, pieces: list[_Piece]) -> int:
        return sum(BINS if self.bits == 2 else p.kept for p in pieces)

    def _pieces(self, layout: Layout) -> Iterator[_Piece]:
        for s in layout.segments:
            if s.numel:
                tiles = tiling(s.shape, self.side, self.side**2)
                kept = tiles.total * min(self.keep, tiles.places)
                yield _Piece(tiles, kept, slice(s.offset, s.offset + s.numel), (kept + 3) // 4 if self.bits == 2 else 0)


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
