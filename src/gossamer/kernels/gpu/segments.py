"""Finds the segments of a program's elements, with one search per program.

A program covers one stretch of a vector. Its start is a 64-bit number, added to the pointers once; places inside are
32-bit. Nearly every stretch lies in one segment; where it does not, the few that it touches are walked.
"""

# Triton's language is not typed Python.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl


@triton.jit
def touched(edges, first, size, count, steps):
    """The first and the last segment of a stretch, by one binary search; steps is at least log2(count)."""
    ends = first + tl.arange(0, 2) * (size - 1)
    low = tl.zeros([2], tl.int32)
    high = low + (count - 1)
    for _ in range(steps):
        middle = (low + high + 1) // 2
        reached = tl.load(edges + middle) <= ends
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return tl.min(low, 0), tl.max(low, 0)


@triton.jit
def entry_of(table, edges, first, place, low, high):
    """The table entry of each position's segment, in a stretch that touches the segments low to high."""
    entry = tl.zeros_like(place).to(tl.float32) + tl.load(table + low)
    for s in range(low + 1, high + 1):
        begin = (tl.load(edges + s) - first).to(tl.int32)
        entry = tl.where(place >= begin, tl.load(table + s), entry)
    return entry


@triton.jit
def of_segment(edges, s, first, place, STRETCH: tl.constexpr):
    """Mask of the positions of a stretch that lie in segment s."""
    begin = (tl.maximum(tl.load(edges + s), first) - first).to(tl.int32)
    end = (tl.minimum(tl.load(edges + s + 1), first + STRETCH) - first).to(tl.int32)
    return (place >= begin) & (place < end)
