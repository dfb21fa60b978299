"""Tiles: a tensor cut into equal pieces with the same number of elements kept in each, so that a place takes few bits."""

from functools import lru_cache
from math import ceil, prod
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.codecs.atoms import waves
from gossamer.core.bucket import Segment
from gossamer.core.parts import require

LONGEST_SIDE = 65_536  # so that a place in a tile has at most 32 bits


class Tiling(NamedTuple):
    """A tensor as a matrix, padded with zeros, cut into tiles of `high` by `wide`."""

    rows: int
    columns: int
    high: int
    wide: int

    @staticmethod
    def of(shape: tuple[int, ...], side: int, run: int) -> "Tiling":
        """Tiles of `side` by `side`, of `run` elements for a vector; a smaller tensor has smaller tiles.

        >>> Tiling.of((100, 30), 64, 64), Tiling.of((5,), 64, 64)
        (Tiling(rows=100, columns=30, high=64, wide=30), Tiling(rows=1, columns=5, high=1, wide=5))
        """
        if len(shape) < 2:
            return Tiling(1, prod(shape), 1, min(run, prod(shape)))
        rows, columns = shape[0], prod(shape[1:])
        return Tiling(rows, columns, min(side, rows), min(side, columns))

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def grid(self) -> tuple[int, int]:
        return (ceil(self.rows / self.high), ceil(self.columns / self.wide)) if self.numel else (0, 0)

    @property
    def total(self) -> int:
        return prod(self.grid)

    @property
    def places(self) -> int:
        """Number of elements of a tile."""
        return self.high * self.wide

    def apart(self, flat: Tensor) -> Tensor:
        """Cut a flat tensor into tiles, one per row."""
        (down, across), matrix = self.grid, flat.view(self.rows, self.columns)
        beyond = (0, across * self.wide - self.columns, 0, down * self.high - self.rows)
        padded = torch.nn.functional.pad(matrix, beyond)
        return padded.view(down, self.high, across, self.wide).transpose(1, 2).reshape(self.total, self.places)

    def together(self, tiles: Tensor) -> Tensor:
        """Inverse of `apart`; drops the padding."""
        down, across = self.grid
        matrix = tiles.view(down, across, self.high, self.wide).transpose(1, 2)
        return matrix.reshape(down * self.high, across * self.wide)[: self.rows, : self.columns].reshape(-1)

    def cosines(self, tiles: Tensor, back: bool = False) -> Tensor:
        """The discrete cosine transform of each tile, down and across, or its inverse."""
        down, across = (waves(n, tiles.dtype, tiles.device) for n in (self.high, self.wide))
        square = tiles.view(-1, self.high, self.wide)
        turned = down.t() @ square @ across if back else down @ square @ across.t()
        return turned.view(-1, self.places)


def check_side(codec: str, side: int) -> None:
    require(
        1 <= side <= LONGEST_SIDE,
        f"{codec}: side must be between 1 and 65,536, got {side}: a place in a tile has at most 32 bits; 64 is usual",
    )


class TiledParameter(NamedTuple):
    """The tiles of one parameter of a bucket."""

    tiles: Tiling
    keep: int  # elements of each tile
    own: slice  # of the bucket

    @property
    def kept(self) -> int:
        return self.keep * self.tiles.total

    @property
    def place_bytes(self) -> int:
        return self.tiles.total * kernels.place_bytes(self.keep, self.tiles.places)


@lru_cache(maxsize=1024)
def pieces(segments: tuple[Segment, ...], keep: int, side: int, run: int) -> tuple[TiledParameter, ...]:
    """The tiles of each parameter that has elements, as `Tiling.of` cuts it; `keep` elements of each are kept, if it has as many."""
    tiled = [(s, Tiling.of(s.shape, side, run)) for s in segments if s.numel]
    return tuple(
        TiledParameter(tiles, min(keep, tiles.places), slice(s.offset, s.offset + s.numel)) for s, tiles in tiled
    )


def largest(tiles: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Indices in each tile of the elements of largest magnitude, and the elements."""
    places = tiles.abs().topk(keep, dim=1, sorted=False).indices.sort(1).values
    return places, tiles.gather(1, places)


def spread(places: Tensor, values: Tensor, width: int) -> Tensor:
    """Tiles with these values and zeros elsewhere; a place beyond the tile, of a damaged message, spoils its last element."""
    values = values.masked_fill(places >= width, torch.nan)
    return values.new_zeros(values.shape[0], width).scatter_(1, places.clamp(max=width - 1), values)
