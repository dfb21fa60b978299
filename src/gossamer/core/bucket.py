"""A bucket: one flat tensor and the layout of the parameters in it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.core.lazy import LazySequence
from gossamer.core.memory_pool import MemoryPool

State = dict[str, Tensor]
SHORT = 8  # a row is short if so many of them fit into a chunk: then no chunk is longer than the mean by more than an eighth


def entry_name(key: str) -> str:
    """The name of a state's entry without its parameter; with it where the state's own key has it after a colon."""
    return key.split("/", maxsplit=1)[0]


class Segment(NamedTuple):
    """One parameter, or a run of its elements, inside a bucket."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def row(self) -> int:
        """The number of elements in one row of a matrix, or in one slice of a larger tensor; 1 for a vector."""
        return prod(self.shape[1:])


class SegmentRun(NamedTuple):
    """Adjacent segments that share one knob, and their offset in the bucket."""

    knob: Any
    layout: "Layout"
    offset: int


class Layout:
    """The offsets and shapes of the parameters in a bucket. Made once and used at every step, as is the memory in `buffers`.

    `knobs` holds one setting for each segment, for codecs that read it (`codecs/mixed.py`), or is empty; `weights` is how long an
    element is written then. Other knobs give another layout of the same bucket, with the same names and the same buffers.
    """

    def __init__(
        self,
        segments: tuple[Segment, ...],
        dtype: torch.dtype = torch.float32,
        knobs: tuple[Any, ...] = (),
        weights: tuple[int, ...] = (),
    ) -> None:
        self.segments = segments
        self.dtype = dtype
        self.knobs, self.weights = knobs, weights
        self.buffers = MemoryPool()
        self.wire_lengths = dict[Any, tuple[int, ...] | None]()  # of chunks: see `Codec.wire_lengths`
        self._edges = dict[int, tuple[int, ...]]()
        self._chunks: dict[int, tuple[Layout, ...]] = {}

    def turned(self, knobs: tuple[Any, ...], weights: tuple[int, ...] = ()) -> "Layout":
        """The same layout with other knobs and weights."""
        if knobs == self.knobs:
            return self
        other = Layout(self.segments, self.dtype, knobs, weights)
        other.buffers = self.buffers
        return other

    @cached_property
    def runs(self) -> tuple[SegmentRun, ...]:
        """The fewest pieces that have one knob each; one piece where there are no knobs."""
        indices = groupby(range(len(self.segments)), key=lambda i: self.knobs[i] if self.knobs else None)
        return tuple(self._piece(knob, [*which]) for knob, which in indices)

    def _piece(self, knob: Any, which: list[int]) -> SegmentRun:
        inside, begin = [self.segments[i] for i in which], self.segments[which[0]].offset
        piece = Layout(tuple(s._replace(offset=s.offset - begin) for s in inside), self.dtype)
        piece.buffers = self.buffers
        return SegmentRun(knob, piece, begin)

    @staticmethod
    def of(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> "Layout":
        """Lay parameters end to end, in the order given."""
        segments, offset = list[Segment](), 0
        for name, shape in shapes.items():
            segments.append(Segment(name, tuple(shape), offset))
            offset += prod(shape)
        return Layout(tuple(segments), dtype)

    @cached_property
    def places(self) -> tuple[tuple[str, tuple[int, ...], tuple[int, ...], int], ...]:
        """The name, shape, strides and offset of each segment."""
        return tuple((s.name, s.shape, _strides(s.shape), s.offset) for s in self.segments)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        return (*(s.offset for s in self.segments), self.numel)

    @cached_property
    def numel(self) -> int:
        return sum(s.numel for s in self.segments)

    @cached_property
    def name(self) -> str:
        """The name of this bucket in error messages and in random draws."""
        return self.segments[0].name if self.segments else "empty"

    def chunks(self, count: int) -> "tuple[Layout, ...]":
        """Cut into `count` runs of nearly equal length, or weight.

        A parameter may be cut anywhere, but where its rows are short between two rows, so that what is left of a matrix
        is one: an edge moves by half a row at most.
        """
        if count not in self._chunks:
            self._chunks[count] = tuple(self._run(lo, hi) for lo, hi in pairwise(self.edges(count)))
        return self._chunks[count]

    def edges(self, count: int) -> tuple[int, ...]:
        """Where each of `count` chunks begins, and where the last one ends."""
        if count not in self._edges:
            longest = self.numel // count // SHORT
            self._edges[count] = tuple(self._edge(self._place(i, count), longest) for i in range(count + 1))
        return self._edges[count]

    def _place(self, i: int, count: int) -> int:
        """The element at which the first `i` of `count` chunks end, before it is moved to a row."""
        if not self.weights:
            return self.numel * i // count
        heavy = [w * s.numel for w, s in zip(self.weights, self.segments, strict=True)]
        rest = sum(heavy) * i // count
        for s, w, mass in zip(self.segments, self.weights, heavy, strict=True):
            if rest < mass:
                return s.offset + rest // w
            rest -= mass
        return self.numel

    def _edge(self, place: int, longest: int) -> int:
        """The start of the row nearest to `place`, unless rows are longer than `longest`."""
        for s in self.segments:
            if s.offset < place < s.offset + s.numel and s.row <= longest:
                return s.offset + (place - s.offset + s.row // 2) // s.row * s.row
        return place

    def _run(self, lo: int, hi: int) -> "Layout":
        inside, knobs = list[Segment](), list[Any]()
        for i, s in enumerate(self.segments):
            begin, end = max(lo, s.offset), min(hi, s.offset + s.numel)
            if begin < end:
                shape = _rows(s, begin - s.offset, end - s.offset)
                inside.append(Segment(f"{s.name}@{begin - s.offset}", shape, begin - lo))
                knobs += self.knobs[i : i + 1]
        return Layout(tuple(inside), self.dtype, tuple(knobs))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def _rows(s: Segment, begin: int, end: int) -> tuple[int, ...]:
    """The shape of a run of a parameter's elements: whole rows of it, or a vector."""
    if len(s.shape) < 2 or begin % s.row or end % s.row:
        return (end - begin,)
    return ((end - begin) // s.row, *s.shape[1:])


@dataclass(frozen=True, eq=False)
class Bucket:
    """A flat tensor (float32, or float64 for double-precision models) and its layout.

    `latest`, if given, is this step's share of `flat`, where a memory has added older values; read it before a mean
    is written. `into`, if given, is where an exchange may write the mean: a tensor of this length whose content is not needed once
    the exchange has begun. It may be `flat` itself. `drains` says that an exchange may subtract what it sent from `flat` at once,
    while it is in cache, and says so in its ReduceResult; the old content of `flat` is then not read again.
    """

    flat: Tensor
    layout: Layout
    into: Tensor | None = None
    latest: Tensor | None = None
    drains: bool = False

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> "Bucket":
        """A bucket holding copies of these tensors.

        >>> bucket = Bucket.of({"w": torch.ones(2, 3), "b": torch.zeros(3)})
        >>> bucket.layout.bounds
        (0, 6, 9)
        >>> {name: tuple(t.shape) for name, t in bucket.tensors()}
        {'w': (2, 3), 'b': (3,)}
        """
        flat = torch.cat([t.detach().reshape(-1) for t in tensors.values()])
        return Bucket(flat, Layout.of({n: tuple(t.shape) for n, t in tensors.items()}, flat.dtype))

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def numel(self) -> int:
        return self.layout.numel

    def like(self, flat: Tensor) -> "Bucket":
        """A bucket of other values with the same layout and the same `into`."""
        return Bucket(flat, self.layout, self.into)

    def with_older(self, flat: Tensor, drains: bool = False) -> "Bucket":
        """A bucket whose `flat` holds these values plus older ones; these alone become `latest`."""
        return Bucket(flat, self.layout, self.into, self.flat, drains)

    def new(self) -> Tensor:
        """An uninitialised flat tensor of this length."""
        return self.layout.buffers.like(self.flat)

    def for_mean(self) -> Tensor:
        """An uninitialised flat tensor to write the mean to. Call it only after `flat` has been read."""
        return self.new() if self.into is None else self.into

    def chunks(self, count: int) -> "Chunks":
        """Views of `count` runs of nearly equal length."""
        return Chunks(self, count)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter as a view in its own shape."""
        begin = self.flat.storage_offset()
        for name, shape, strides, offset in self.layout.places:
            yield name, self.flat.as_strided(shape, strides, begin + offset)  # a slice and a view take twice as long


class Chunks(LazySequence[Bucket]):
    """Runs of a bucket's elements; each is made when it is asked for, as views of the bucket."""

    def __init__(self, block: Bucket, count: int) -> None:
        self.block, self.layouts, self.edges = block, block.layout.chunks(count), block.layout.edges(count)

    def __len__(self) -> int:
        return len(self.layouts)

    def item(self, index: int) -> Bucket:
        run, latest = slice(self.edges[index], self.edges[index + 1]), self.block.latest
        return Bucket(self.block.flat[run], self.layouts[index], None, None if latest is None else latest[run])


class PendingState(State):
    """A copy of a state whose changes take effect at `commit`.

    Parts never write into a state tensor; they assign a new one. So a step that is skipped (a non-finite gradient
    anywhere) leaves no trace: its pending states are dropped.
    """

    def __init__(self, settled: State) -> None:
        super().__init__(settled)
        self._settled = settled

    def commit(self) -> None:
        self._settled.clear()
        self._settled.update(self)

    def commit_if(self, fine: Tensor) -> None:
        """Commit where the device tensor `fine` is true, without waiting for the device; else keep the old state, or zero.

        Scalars, which live on the host, are committed either way.
        """
        for key, new in self.items():
            old = self._settled.get(key)
            if new.dim() and new is not old:
                before = torch.zeros_like(new) if old is None or old.shape != new.shape else old
                torch.where(fine, new, before, out=new)  # safe: `new` has not been read yet
        self.commit()
