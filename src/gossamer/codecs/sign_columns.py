"""1-bit SGD: one bit per element of a matrix, and two values per row."""

from collections.abc import Iterator
from typing import Annotated, Literal, final

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.codecs.base import FewBytes
from gossamer.core.bucket import Bucket, Layout, Segment, State
from gossamer.core.contracts import Biased, Codec, Context
from gossamer.core.parts import part
from gossamer.core.ranges import Choice
from gossamer.core.wire import expect, pack, take


@final
@part("sign_columns")
class SignColumns(Biased, FewBytes, Codec):
    """Replace each element of a matrix row by one of two values: the mean of the row's upper or of its lower elements.

    `threshold="zero"`: upper elements are >= 0, lower ones < 0; the value of an empty set is 0. No other two values have less
    error for this split: .36 of a Gaussian's square. `threshold="mean"`: mu + dev and mu - dev, with mu the row's mean and dev its
    mean distance from that; a constant row is exact. A row holds the weights of one output: the paper's column. Vectors, also
    matrices with rows of one element, and matrices that a chunk cuts through a row, are sent in full.

    Use: with error_feedback(), for matrices whose rows differ in size; else sign() does the same with fewer scales.

    Not for: models of vectors, nor matrices of short rows: two numbers for eight elements are more than a byte each.

    Wire: for each matrix 8 bytes per row, one bit per element of all matrices, and 4 bytes per element of the rest.

    >>> from gossamer.core.rng import CounterRng
    >>> block = Bucket.of({"w": torch.tensor([[3.0, -1.0, 5.0, -2.0], [1.0, 1.0, 1.0, 1.0]])})
    >>> codec = SignColumns()
    >>> wire = codec.encode(block, {}, Context(0, 1, 0, CounterRng(0, 0, 0)))
    >>> wire.numel(), codec.decode(wire, block)
    (17, tensor([ 4.0000, -1.5000,  4.0000, -1.5000,  1.0000,  1.0000,  1.0000,  1.0000]))

    Paper: Seide, Fu, Droppo, Li, Yu, 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training
    of Speech DNNs, Interspeech 2014.
    """

    threshold: Annotated[Literal["zero", "mean"], Choice("zero", "mean")] = "zero"

    def wire_bytes(self, layout: Layout) -> int:
        rows, bits, rest = _counts(layout)
        return 8 * rows + 4 * rest + kernels.sign_bytes(bits)

    def encode(self, block: Bucket, state: State, context: Context) -> Tensor:
        flat, numbers, centred, whole = block.flat.float(), list[Tensor](), list[Tensor](), list[Tensor]()
        for s, x in _pieces(flat, block.layout):
            if not _is_matrix(s):
                whole.append(x)
                continue
            rows = x.view(-1, s.row)
            middle = rows.mean(1, keepdim=True) if self.threshold == "mean" else None
            far = rows if middle is None else rows - middle
            numbers.append(_two(rows) if middle is None else _even(middle, far))
            centred.append(far.reshape(-1))
        bits = flat.new_empty(0, dtype=torch.uint8)
        if centred:
            x = torch.cat(centred)
            bits = torch.empty(kernels.sign_bytes(x.numel()), dtype=torch.uint8, device=flat.device)
            kernels.sign_encode(x, (0, x.numel()), 1, bits)
        return pack(torch.cat([flat.new_empty(0), *(n.reshape(-1) for n in numbers), *whole]), bits)

    def accumulate(self, wire: Tensor, layout: Layout, into: Tensor, weight: float) -> None:
        expect(wire, self.wire_bytes(layout), "sign_columns")
        rows, bits, rest = _counts(layout)
        numbers, payload = take(wire, torch.float32, 2 * rows + rest)
        upper = torch.empty(bits, device=into.device, dtype=torch.float32)
        kernels.sign_decode(payload, (0, bits), numbers.new_ones(1), upper)
        upper.clamp_(min=0)
        numbers, place, row, left = numbers.to(into.dtype), 0, 0, 2 * rows
        for s, out in _pieces(into, layout):
            if _is_matrix(s):
                count = s.numel // s.row
                two = numbers[2 * row : 2 * (row + count)].view(count, 2, 1)
                low, high = (two + two.sum(1, keepdim=True) * 0).unbind(1)  # what is not finite shows in all its row
                is_high = upper[place : place + s.numel].view(count, s.row).to(into.dtype)
                # at 0 and at 1 that is one or the other, to the bit; torch chooses between two columns in five times the time
                out.add_(torch.lerp(low, high, is_high).view(-1), alpha=weight)
                place, row = place + s.numel, row + count
            else:
                out.add_(numbers[left : left + s.numel], alpha=weight)
                left += s.numel


def _is_matrix(s: Segment) -> bool:
    return len(s.shape) > 1 and s.row > 1


def _counts(layout: Layout) -> tuple[int, int, int]:
    """Number of matrix rows, of their elements, and of all other elements."""
    matrices = [s for s in layout.segments if _is_matrix(s)]
    bits = sum(s.numel for s in matrices)
    return sum(s.numel // s.row for s in matrices), bits, layout.numel - bits


def _pieces(flat: Tensor, layout: Layout) -> Iterator[tuple[Segment, Tensor]]:
    for s in layout.segments:
        yield s, flat[s.offset : s.offset + s.numel]


def _two(rows: Tensor) -> Tensor:
    """Means of each row's elements below zero, and of its other elements."""
    # Once: where memory comes from the system anew, that takes longer than the arithmetic.
    room = torch.empty_like(rows)
    count = torch.ge(rows, 0, out=room).sum(1)
    high = torch.clamp(rows, min=0, out=room).sum(1) / count.clamp(min=1)
    low = torch.clamp(rows, max=0, out=room).sum(1) / (rows.shape[1] - count).clamp(min=1)
    return torch.stack([low, high], 1)


def _even(middle: Tensor, far: Tensor) -> Tensor:
    """Values at equal distances below and above each row's mean."""
    spread = far.abs().mean(1, keepdim=True)
    return torch.cat([middle - spread, middle + spread], 1)
