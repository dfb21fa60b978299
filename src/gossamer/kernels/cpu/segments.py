"""Walks over a vector, in chunks that stay in L1, and over the segments in each."""

from __future__ import annotations

from collections.abc import Iterator

from gossamer.kernels.cpu.compile import Longs, walker


@walker
def pieces(edges: Longs, chunk: int) -> Iterator[tuple[int, int, int, int, int]]:
    """The parts of a vector that lie in one chunk and one segment, in order.

    Yields (begin of the chunk, its end, segment, begin of the part, its end). Empty segments are left out.
    """
    n, segment = edges[-1], 0
    for lo in range(0, n, chunk):
        hi = min(lo + chunk, n)
        a = lo
        while a < hi:
            while edges[segment + 1] <= a:
                segment += 1
            b = min(hi, edges[segment + 1])
            yield lo, hi, segment, a, b
            a = b
