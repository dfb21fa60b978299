"""GradiVeQ: projections of gradient slices on principal directions of earlier gradients."""

from functools import lru_cache
from typing import Annotated, NamedTuple, final

import torch
from torch import Tensor

from gossamer.codecs.casts import FP32
from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, Layout, Segment, State
from gossamer.core.contracts import Biased, Context, LinearCodec, Policy, ReduceResult
from gossamer.core.errors import AttachError
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice
from gossamer.core.verbs import Program, all_reduce

SWEEPS = 8  # of the subspace iteration, which begins with the directions of before


@final
@part("gradiveq", sample="gradiveq(length=16, ratio=3, learn=1)")
class GradiVeQ(Biased, LinearCodec):
    """Project slices of matrices on principal directions of earlier gradients; projections can be summed.

    A matrix's rows are cut into equal slices s of at most `length` elements, at the same positions in every row. For `learn`
    steps the gradient is sent in full, and C = sum s s^T of the mean is accumulated; U are its leading eigenvectors, one for
    every `ratio` elements of a slice, the same on all ranks. For the next `every` steps U^T s is sent, and the mean is
    U mean(U^T s); then it starts again. The part orthogonal to U is sent in the next learning phase with error feedback, else it
    is lost. Vectors, and matrices with fewer slices than a slice has elements, are sent in full.

    Use: with error_feedback() where ring all-reduces are fast, and gradients keep their directions for hundreds of steps: it
    does two thin products a step, and computes no directions in between.

    Not for: the first hundreds of steps, in which directions change: powersgd() follows them at every step, and sends fewer
    bytes per matrix. Nor models of short rows.

    Wire: for `every` steps an all-reduce of 4 / ratio bytes per element of matrices, and 4 per other element; for `learn`
    steps 4 bytes per element. Memory: `length` / ratio elements per element of a slice, for each matrix.

    >>> from gossamer.core.rng import CounterRng
    >>> block, state = Bucket.of({"w": torch.outer(torch.arange(1.0, 9.0), torch.ones(8))}), dict[str, Tensor]()
    >>> codec, sent = GradiVeQ(length=8, ratio=8, learn=1), list[int]()
    >>> for step in (1, 2):
    ...     program = codec.average(block, state, Context(0, 1, step, CounterRng(0, step, 0)))
    ...     asked = next(program); sent.append(asked.tensor.numel())
    ...     try: program.send(asked.tensor)
    ...     except StopIteration as end: mean = end.value.mean
    >>> sent, bool(torch.allclose(mean, block.flat, atol=1e-5))
    ([64, 8], True)

    Paper: Yu, Lin, Narra, Li, Li, Kim, Schwing, Annavaram, Avestimehr, GradiVeQ: Vector Quantization for Bandwidth-Efficient
    Gradient Aggregation in Distributed CNN Training, NeurIPS 2018.
    """

    length: int = 256
    ratio: Annotated[int, Choice(4, 8, 16)] = 8
    learn: int = 10
    every: int = 200

    def __post_init__(self) -> None:
        require(
            2 <= self.ratio <= self.length,
            f"gradiveq: ratio must be from 2 to length, {self.length}, got {self.ratio}; 8 is usual",
        )
        require(self.learn >= 1, f"gradiveq: learn must be at least 1 step, got {self.learn}; 10 are usual")
        require(self.every >= 1, f"gradiveq: every must be at least 1 step, got {self.every}; hundreds are usual")

    def fits(self, binding: Binding) -> None:
        """Refuse a model without a matrix: all of it would be sent in full."""
        segments = [s for layout in binding.layouts for s in layout.segments]
        if any(s.numel for s in segments) and not any(s.numel and len(s.shape) > 1 for s in segments):
            raise AttachError(
                f"{self}: the model has no matrix, and vectors are sent in full; use allreduce(fp32()), or scatter(qsgd())"
            )

    def policy(self, key: str) -> Policy:
        return "equal"

    def sum_bytes(self, layout: Layout, size: int) -> list[int]:
        """Bytes of a step outside of the learning phase."""
        slices, plain = _cut(self, layout.segments)
        count = sum(s.rows * s.kept for s in slices) + sum(end - begin for begin, end in plain)
        return [count * layout.dtype.itemsize] if count else []

    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        cut = _cut(self, block.layout.segments)
        known = all(_kept(state, f"basis:{s.name}", s.kept, s.long) is not None for s in cut.slices)
        age = int(state.get("age", 0))
        age = age if known or age < self.learn else 0
        state["age"] = torch.tensor((age + 1) % (self.learn + self.every))
        if age >= self.learn:
            return (yield from self._along(cut, block, state, context))
        result = yield from FP32().average(block, {}, context)
        for s in cut.slices:
            self._learn(s, s.of(result.mean), age, state, context)
        return result

    def _along(self, cut: "_Cut", block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        """Average the projections, and in full all elements that are not cut into slices."""
        bases = [state[f"basis:{s.name}"] for s in cut.slices]
        own = [s.of(block.flat) @ basis.t() for s, basis in zip(cut.slices, bases, strict=True)]
        rest = [block.flat[begin:end].clone() for begin, end in cut.plain]
        message = torch.cat([block.flat.new_empty(0), *(t.reshape(-1) for t in (*own, *rest))])
        if message.numel():
            message = (yield from all_reduce(message)) / context.size
        means = message.split([t.numel() for t in (*own, *rest)])
        mean = block.for_mean()
        for s, basis, c in zip(cut.slices, bases, means, strict=False):
            torch.mm(c.view(s.rows, s.kept), basis, out=s.of(mean))
        for (begin, end), x in zip(cut.plain, means[len(own) :], strict=True):
            mean[begin:end] = x

        def add_sent(into: Tensor, weight: float) -> None:
            for s, basis, c in zip(cut.slices, bases, own, strict=True):
                s.of(into).addmm_(c, basis, alpha=weight)
            for (begin, end), x in zip(cut.plain, rest, strict=True):
                into[begin:end].add_(x, alpha=weight)

        return ReduceResult(mean, add_sent)

    def _learn(self, s: "_Slices", x: Tensor, age: int, state: State, context: Context) -> None:
        """Take one agreed mean into account, in its own size; the last one tells where the directions are."""
        largest = x.abs().max()
        # Of a mean that is not finite nothing is kept.
        x = (x / torch.where(largest > 0, largest, 1.0)).nan_to_num(0.0, 0.0, 0.0)
        moment = x.t() @ x
        if age and (before := _kept(state, f"moment:{s.name}", s.long, s.long)) is not None:
            moment += before
        if age + 1 < self.learn:
            state[f"moment:{s.name}"] = moment
            return
        state.pop(f"moment:{s.name}", None)
        basis = _kept(state, f"basis:{s.name}", s.kept, s.long)
        if basis is None:
            basis = context.rng.shared_normal(f"{s.name}/gradiveq", s.kept, s.long).to(x)
        for _ in range(SWEEPS):
            basis = torch.linalg.qr(moment @ basis.t())[0].t()
        state[f"basis:{s.name}"] = basis.contiguous()


def _kept(state: State, key: str, rows: int, columns: int) -> Tensor | None:
    """What is kept of a matrix; None where nothing is, or what a codec of other numbers left, as a controller may change them."""
    found = state.get(key)
    return found if found is not None and found.shape == (rows, columns) else None


class _Slices(NamedTuple):
    """Those of one matrix: how many there are, how long they are, and how many directions they are said in."""

    name: str
    offset: int
    rows: int
    long: int
    kept: int

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.rows * self.long].view(self.rows, self.long)


class _Cut(NamedTuple):
    slices: tuple[_Slices, ...]
    plain: tuple[tuple[int, int], ...]  # where what is not cut begins and ends


@lru_cache(maxsize=1024)
def _cut(codec: GradiVeQ, segments: tuple[Segment, ...]) -> _Cut:
    slices, plain = list[_Slices](), list[tuple[int, int]]()
    for s in segments:
        row = s.row if len(s.shape) > 1 else 0
        long = max((n for n in range(1, min(row, codec.length) + 1) if row % n == 0), default=0)
        if long >= codec.ratio and s.numel >= long * long:
            slices.append(_Slices(s.name, s.offset, s.numel // long, long, long // codec.ratio))
        elif s.numel:
            plain.append((s.offset, s.offset + s.numel))
    return _Cut(tuple(slices), tuple(plain))
