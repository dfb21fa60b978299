"""QSGD: stochastic rounding to a few bits per element, with one norm per bucket of elements."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import log2
from typing import Annotated, Literal, final

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.codecs.base import FewBytes, SingleCodec, Unbiased
from gossamer.core.bucket import Bucket, Chunks, Layout, State
from gossamer.core.contracts import Context, Levelled
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice, Range
from gossamer.core.wire import WireRows, expect, rows_of, take

_WHOLE = tuple(2 ** (bits - 1) - 1 for bits in range(2, 9))
# Any number may be written; from these a controller chooses, no more than an eighth apart
_LEVELS = (*range(1, 17), 18, 20, 22, 24, 27, 30, 33, 37, 41, 46, 51, 57, 64, 72, 81, 91, 102, 114, 127)


@final
@part("qsgd")
class QSGD(Unbiased, FewBytes, SingleCodec, Levelled):
    """QSGD: stochastic rounding of each element to 2^bits - 1 evenly spaced levels of its bucket's norm.

    s = 2^(bits-1) - 1;  level = floor(s x / norm + u), u ~ U[0, 1);  decoded norm * level / s. Unbiased, with variance
    (norm / s)^2 sum f (1 - f), f the fractional part of s |x| / norm. One bit: the two points -norm and +norm.
    An element's position between two levels is rounded down to 2^-23 of a level: it is unbiased to that precision only.

    Use: for 8 times fewer bytes at 4 bits, without a memory. Smaller buckets have less noise and need more bytes.

    Not for: fewer than 4 bits without watching the loss: the noise grows fast, and costs steps. `code="rice"` is for slow links
    and CPUs: on a GPU the host does not know the length of a message in advance.

    Wire: ceil(bits d / 8) + 4 ceil(d / bucket) bytes. `bits` are those on the wire, the sign included.

    `code="rice"` writes levels near zero in fewer bits, and takes any number of `levels` on each side of zero up to 127; lengths
    then depend on the data, and cost one more small gather. Bits per element, in place of 4 in fixed width (7 levels, buckets of 512):
    Gaussian gradients 3.35, Laplace 2.72, Student's t 2.09, each within .2 of their entropy; in the paper's Elias code 4.22, 3.23
    and 2.58. A small Transformer's 2.91, for blocks of zeros take next to nothing. With `norm="l2"`, where most levels are zero,
    1.4 (Elias 1.6 to 1.7). To write and read it takes ten times as long as fixed width, some 9 ns an element more: so it pays
    below some tens of Mbit/s.

    >>> from gossamer.core.rng import CounterRng
    >>> block = Bucket.of({"w": torch.tensor([7.0, -3.0, 0.0, 1.0])})
    >>> codec = QSGD(bits=4)
    >>> wire = codec.encode(block, {}, Context(0, 1, 0, CounterRng(0, 0, 0)))
    >>> wire.numel(), codec.decode(wire, block)
    (6, tensor([ 7., -3.,  0.,  1.]))

    Paper: Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, NIPS 2017.
    """

    bits: Annotated[int, Range(2, 8)] = 4
    bucket: Annotated[int, Choice(64, 128, 256, 512, 1024, 2048)] = 512
    norm: Annotated[Literal["max", "l2"], Choice("max", "l2")] = "max"
    code: Literal["fixed", "rice"] = "fixed"
    levels: int | None = None

    def __post_init__(self) -> None:
        require(1 <= self.bits <= 8, f"qsgd: bits must be between 1 and 8, got {self.bits}; for more use bf16 or fp32")
        require(self.bucket >= 1, f"qsgd: bucket must be at least 1, got {self.bucket}; the paper uses 512 for 4 bits")

        require(
            self.levels is None or (self.code == "rice" and 1 <= self.levels <= 127),
            f"qsgd: levels must be between 1 and 127, and need code='rice', got {self.levels} with code={self.code!r}; in fixed width "
            "bits sets their number: 2^(bits - 1) - 1 on each side of zero",
        )
        require(
            self.levels is None or self.bits == 4,
            "qsgd: pass bits or levels, not both; without levels there are 2^(bits - 1) - 1",
        )
        require(
            self.code == "fixed" or self.bits > 1,
            "qsgd: one bit has no level at zero, and no shorter code; use code='fixed'",
        )

    @property
    def contracts(self) -> bool:
        return self._omega(self.bucket) < 1

    def omega(self, layout: Layout) -> float:
        return self._omega(min(self.bucket, max(layout.numel, 1)))

    def _omega(self, n: int) -> float:
        """The least upper bounds of the relative variance: some bucket of n elements attains them, or nearly so."""
        s = self.steps
        if self.bits == 1:
            return n - 1.0
        if self.norm == "max":
            return ((1 + (n - 1) / s**2) ** 0.5 - 1) / 2
        return n**0.5 / s - 1 if n >= 4 * s**2 else n / (4 * s**2)

    @property
    def steps(self) -> int:
        return max(2 ** (self.bits - 1) - 1, 1) if self.levels is None else self.levels

    @property
    def widths(self) -> tuple[float, ...]:
        return tuple(1 + log2(1 + s) for s in (_LEVELS if self.code == "rice" else _WHOLE))

    def of_width(self, bits: float) -> Levelled:
        if self.code == "fixed":
            return replace(self, bits=round(bits))
        return replace(self, bits=4, levels=round(2 ** (bits - 1) - 1))

    def spread(self, block: Bucket) -> Tensor:
        """Noise per parameter: quantisation buckets cross parameters, which share their noise; each run starts a new one."""
        runs, flat = block.layout.runs, block.flat.float()
        norms = [kernels.bucket_norms(flat[at : at + run.numel], self.bucket, self.norm) for _, run, at in runs]
        squares = torch.nn.functional.pad(torch.cat(norms).double().square(), (0, 1))
        until = torch.nn.functional.pad((squares * self.bucket).cumsum(0), (1, 0))
        ends = _ends_on(tuple(run.bounds for _, run, _ in runs), self.bucket, squares)
        reached = until[ends[0]] + squares[ends[0]] * ends[1]
        return reached[1] - reached[0]

    def wire_limit(self, layout: Layout) -> int:
        fixed = self.wire_bytes(layout)
        return 4 * self._buckets(layout) + kernels.levels_most(layout.numel, self.steps) if fixed is None else fixed

    def wire_bytes(self, layout: Layout) -> int | None:
        return None if self.code == "rice" else self._fixed_bytes(layout)

    def _fixed_bytes(self, layout: Layout) -> int:
        return 4 * self._buckets(layout) + kernels.quantise_bytes(layout.numel, self.bits)

    def encode(self, block: Bucket, state: State, context: Context) -> Tensor:
        flat, key = block.flat.float(), context.rng.key(f"{block.name}/qsgd")
        wire = block.layout.buffers.of(self.wire_limit(block.layout), flat.device)
        norms, payload = take(wire, torch.float32, self._buckets(block.layout))
        measure = self.norm == "max"
        if not measure:
            norms.copy_(kernels.bucket_norms(flat, self.bucket, self.norm))
        if self.code == "rice":
            length = kernels.levels_encode(flat, self.steps, self.bucket, norms, key, payload, measure)
            return wire[: 4 * norms.numel() + length]
        kernels.quantise_encode(flat, self.bits, self.bucket, norms, key, payload, measure)
        return wire

    def encode_each(self, chunks: Chunks, state: State, context: Context) -> Sequence[Tensor]:
        lengths = self.wire_lengths(chunks.block.layout, len(chunks))
        if lengths is None or self.norm != "max":
            return super().encode_each(chunks, state, context)
        flat, keys = chunks.block.flat.float(), context.rng.keys([f"{chunk.name}/qsgd" for chunk in chunks.layouts])
        width = -(-max(lengths) // 4) * 4
        rows = chunks.block.layout.buffers.of(len(chunks) * width, flat.device).view(len(chunks), width)
        kernels.quantise_each(flat, chunks.edges, self.bits, self.bucket, keys, rows)
        return WireRows(rows, lengths)

    def accumulate_each(self, wires: Sequence[Tensor], layout: Layout, into: Tensor) -> None:
        if self.code == "rice" or into.dtype != torch.float32 or not wires or not layout.numel:
            super().accumulate_each(wires, layout, into)
            return
        rows = rows_of(wires, self._fixed_bytes(layout), "qsgd")
        kernels.quantise_accumulate_each(rows, self.bits, self.bucket, into)

    def read(self, wire: Tensor, layout: Layout, out: Tensor, weight: float | None = None) -> None:
        norms, payload = self._open(wire, layout)
        if self.code == "rice":
            kernels.levels_decode(payload, self.steps, self.bucket, norms, out, weight)
        else:
            kernels.quantise_decode(payload, self.bits, self.bucket, norms, out, weight)

    def scales(self, wire: Tensor, layout: Layout) -> Tensor | None:
        return self._open(wire, layout)[0]

    def _open(self, wire: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        if self.code == "fixed":
            expect(wire, self._fixed_bytes(layout), "qsgd")
        return take(wire, torch.float32, self._buckets(layout))

    def _buckets(self, layout: Layout) -> int:
        return -(-layout.numel // self.bucket)


def _ends_on(runs: tuple[tuple[int, ...], ...], bucket: int, like: Tensor) -> Tensor:
    """The ends where that tensor is; copied there once, for that copy waits."""
    key = runs, bucket, like.device
    if key not in _copied:
        while len(_copied) >= 1024:
            _copied.pop(next(iter(_copied)))
        table = _ends(runs, bucket)
        _copied[key] = like.new_zeros(table.shape, dtype=torch.int64).copy_(table)
    return _copied[key]


_copied = dict[tuple[tuple[tuple[int, ...], ...], int, torch.device], Tensor]()


def _ends(runs: tuple[tuple[int, ...], ...], bucket: int) -> Tensor:
    """Where each parameter begins and where it ends: in which bucket, counted over all runs, and how far in it.

    >>> _ends(((0, 3, 8), (0, 4)), 4).tolist()
    [[[0, 0, 2], [0, 2, 3]], [[0, 3, 0], [3, 0, 0]]]
    """
    places, before = list[tuple[int, int, int, int]](), 0
    for bounds in runs:
        for begin, end in pairwise(bounds):
            places.append((before + begin // bucket, before + end // bucket, begin % bucket, end % bucket))
        before += -(-bounds[-1] // bucket)
    return torch.tensor(places, dtype=torch.int64, device="cpu").t().reshape(2, 2, -1)
