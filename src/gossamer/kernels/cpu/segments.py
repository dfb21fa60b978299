"""The walk over the segments of a chunk."""

from __future__ import annotations

from gossamer.kernels.cpu.compile import Longs, inlined, kernel


@kernel
def piece(edges: Longs, segment: int, begin: int, stop: int) -> tuple[int, int, int]:
    """The segment of an element, and the part of it that lies in [begin, stop): (segment, begin, end).

    The search starts at a segment that does not lie behind the element, such as that of the piece before.
    """
    inlined()
    while edges[segment + 1] <= begin:
        segment += 1
    return segment, begin, min(stop, edges[segment + 1])
