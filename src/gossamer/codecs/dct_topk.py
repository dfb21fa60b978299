"""DeMo's codec: the top-k DCT coefficients of each tile."""

from typing import Annotated, final

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


@final
@part("dct_topk")
class DCTTopK(Biased, FewBytes, Codec):
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

    def wire_bytes(self, layout: Layout) -> int:
        return sum(4 * p.kept + p.place_bytes for p in self._pieces(layout))

    def encode(self, block: Bucket, state: State, context: Context) -> Tensor:
        flat, places, values = block.flat.float(), list[Tensor](), list[Tensor]()
        for tiles, keep, own in self._pieces(block.layout):
            where, what = largest(tiles.cosines(tiles.apart(flat[own])), keep)
            places.append(kernels.places_encode(where, tiles.places))
            values.append(what.view(-1))
        if not values:
            return flat.new_empty(0, dtype=torch.uint8)
        return pack(torch.cat(values), *places)

    def accumulate(self, wire: Tensor, layout: Layout, into: Tensor, weight: float) -> None:
        expect(wire, self.wire_bytes(layout), "dct_topk")
        values, rest = take(wire, torch.float32, sum(p.kept for p in self._pieces(layout)))
        for p in self._pieces(layout):
            mine, values = values[: p.kept].view(-1, p.keep), values[p.kept :]
            coded, rest = rest[: p.place_bytes], rest[p.place_bytes :]
            places = kernels.places_decode(coded, p.tiles.total, p.keep, p.tiles.places)
            kept = p.tiles.cosines(spread(places, mine, p.tiles.places), back=True)
            into[p.own].add_(p.tiles.together(kept).to(into.dtype), alpha=weight)

    def _pieces(self, layout: Layout) -> tuple[TiledParameter, ...]:
        return pieces(layout.segments, self.keep, self.side, self.side)
