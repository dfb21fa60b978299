"""DeMo's codec: the top-k DCT coefficients of each tile."""

from collections.abc import Iterator
from typing import Annotated, final

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.codecs.tiles import Tiling, check_side, largest, spread, tiling
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Biased, Codec, Context
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice
from gossamer.core.wire import expect, pack, take


@final
@part("dct_topk")
class DCTTopK(Biased, Codec):
    """Send the `keep` largest DCT coefficients of every tile of `side` by `side` elements.

    q = top_k(D X D'), C(X) = D' q D, with D orthonormal: |x - C(x)|^2 <= (1 - k/n) |x|^2. Vectors have tiles of `side` elements;
    a smaller tensor is one tile, and tiles are padded with zeros at the edges. A movement that neighbours share lies in few
    coefficients, and is sent at once.

    Use: under DeMo: gather(dct_topk()) + error_feedback(decay=0.999) + signs(), the preset `demo`.

    Not for: gradients with uncorrelated neighbours: there topk() is as good and costs no transform.

    Wire: per coefficient 4 bytes of float32 and its place in the tile, with the default 8.5 bits in a full one: 162 bytes for a tile.

    >>> from gossamer.core.rng import CounterRng
    >>> block, codec = Bucket.of({"w": torch.ones(64, 64)}), DCTTopK(keep=1)
    >>> wire = codec.encode(block, {}, Context(0, 1, 0, CounterRng(0, 0, 0)))
    >>> wire.numel(), bool((codec.decode(wire, block) - 1).abs().max() < 1e-5)
    (6, True)

    Paper: Peng, Quesnelle, Kingma, DeMo: Decoupled Momentum Optimization, 2024.
    """

    keep: Annotated[int, Choice(8, 16, 32, 64)] = 32
    side: Annotated[int, Choice(16, 32, 64)] = 64

    def __post_init__(self) -> None:
        require(
            self.keep >= 1, f"dct_topk: keep must be at least 1 coefficient of a tile, got {self.keep}; 32 is usual"
        )
        check_side("dct_topk", self.side)

    @property
    def bucket_mb(self) -> float:
        return 25.0

    def wire_bytes(self, layout: Layout) -> int:
        return sum(4 * self._kept(t) + self._place_bytes(t) for t, _ in self._tilings(layout))

    def encode(self, block: Bucket, state: State, context: Context) -> Tensor:
        flat, places, values = block.flat.float(), list[Tensor](), list[Tensor]()
        for tiles, own in self._tilings(block.layout):
            where, what = largest(tiles.cosines(tiles.apart(flat[own])), min(self.keep, tiles.places))
            places.append(kernels.places_encode(where, tiles.places))
            values.append(what.view(-1))
        if not values:
            return flat.new_empty(0, dtype=torch.uint8)
        return pack(torch.cat(values), *places)

    def accumulate(self, wire: Tensor, layout: Layout, into: Tensor, weight: float) -> None:
        expect(wire, self.wire_bytes(layout), "dct_topk")
        values, rest = take(wire, torch.float32, sum(self._kept(t) for t, _ in self._tilings(layout)))
        for tiles, own in self._tilings(layout):
            mine, values = values[: self._kept(tiles)].view(tiles.total, -1), values[self._kept(tiles) :]
            coded, rest = rest[: self._place_bytes(tiles)], rest[self._place_bytes(tiles) :]
            places = kernels.places_decode(coded, tiles.total, mine.shape[1], tiles.places)
            kept = spread(places, mine, tiles.places)
            into[own].add_(tiles.together(tiles.cosines(kept, back=True)).to(into.dtype), alpha=weight)

    def _kept(self, tiles: Tiling) -> int:
        return tiles.total * min(self.keep, tiles.places)

    def _place_bytes(self, tiles: Tiling) -> int:
        return tiles.total * kernels.place_bytes(min(self.keep, tiles.places), tiles.places)

    def _tilings(self, layout: Layout) -> Iterator[tuple[Tiling, slice]]:
        for s in layout.segments:
            if s.numel:
                yield tiling(s.shape, self.side, self.side), slice(s.offset, s.offset + s.numel)
