"""Scatter: reduce-scatter and all-gather of encoded chunks, so that bytes do not grow with the number of ranks."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal, final

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, Chunks, Layout, State
from gossamer.core.constraints import those
from gossamer.core.contracts import Codec, CodecExchange, Context, Policy, ReduceResult, Unit
from gossamer.core.parts import part, require
from gossamer.core.verbs import Program, all_gather_ragged, all_to_all_ragged, read_all_gather, read_all_to_all
from gossamer.core.wire import EqualReader, LazyWires, Read, Reader, in_order, receive_order, send_order, without
from gossamer.exchanges.two_steps import TwoSteps


@final
@part("scatter", sample="scatter(fp32())")
class Scatter(TwoSteps, CodecExchange):
    """Reduce-scatter then all-gather: each rank averages one of N chunks, encodes the mean again and sends it to all ranks.

    All-to-all of N - 1 encoded chunks, decode and sum (the rank's own share first, then that of the rank before, and so on
    round), encode, all-gather. Chunks are encoded and decoded while others are in flight. A rank's own share is not sent and is
    exact. Chunks are cut between the rows of a matrix where these are short, so that codecs of matrices see matrices.
    `answer` is the codec of the mean, by default the same. Averaging reduces the noise of the N messages, but nothing reduces
    that of the answer: a finer codec for the answer costs bytes once, and removes most of the noise.

    `feedback` is the share of the second encoding's error that the owner of a chunk adds to its next mean. By default the
    memory sets it: 1 under error feedback, where nothing may be lost (rounding to 16 bits, say, errs the same way each time),
    and DIANA's rate under DIANA, so that all estimates follow one mean. Without a memory it is 0: the error is the noise of an
    unbiased codec, or as small as that of 16 bits; only for a codec that needs error feedback it is 1 then too.

    `own="encoded"` encodes and decodes the own share like all others, so that every rank has the same weight in every chunk:
    in a majority vote the owner must not vote with numbers while all others vote with signs.

    Use: from three ranks on, for codecs whose messages can be decoded one by one.

    Not for: a codec that must see the whole gradient. The mean is encoded, and so rounded, a second time.

    Wire: (N-1)/N of one message and of one answer each way, whatever N.

    >>> from gossamer.codecs import Ternary
    >>> Scatter(Ternary())
    scatter(ternary())
    >>> Scatter(Ternary(), answer=Ternary(levels=3))
    scatter(ternary(), answer=ternary(levels=3))
    """

    codec: Codec
    feedback: float | None = None
    answer: Codec | None = None
    own: Literal["exact", "encoded"] = "exact"

    def __post_init__(self) -> None:
        for codec in self.both:
            require(
                isinstance(codec, Codec),  # pyright: ignore[reportUnnecessaryIsInstance]
                f"scatter({codec}): of {codec.name}'s messages only their sum can be read, not one alone; use allreduce({codec})",
            )
            require(
                not codec.whole,
                f"scatter({codec}): chunks have no global top-k, which needs the whole gradient; use gather({codec})",
            )
        require(
            self.feedback is None or 0 <= self.feedback <= 1,
            f"scatter: feedback must lie in [0, 1], got {self.feedback}; leave it out for the codec's own",
        )

    @property
    def traits(self) -> frozenset[str]:
        said = self.feedback is not None
        return super().traits | those(own_feedback=said, part_feedback=said and self.feedback != 1)

    @property
    def answers(self) -> Codec:
        """The codec that encodes the mean."""
        return self.codec if self.answer is None else self.answer

    @property
    def both(self) -> tuple[Codec, Codec]:
        return self.codec, self.answers

    @property
    def encodes_mean(self) -> bool:
        return True

    def least_blocks(self, size: int) -> int:
        # Two ranks send one chunk each, so that within a bucket no chunk is encoded while another is in flight.
        return 2 if size == 2 else 1

    def omega(self, layout: Layout, size: int) -> float:
        return max(self.codec.omega(layout), self.answers.omega(layout))

    def policy(self, key: str) -> Policy:
        return "owner" if key == "owed" else "mean"

    def unit(self, key: str) -> Unit:
        return "gradient" if key == "owed" else "none"

    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        codec, rank = self.codec, context.rank
        chunks = block.chunks(context.size)
        own, sent = chunks[rank], dict[int, Tensor]()
        all_sent: Sequence[Tensor] | None = None  # where they were made at once
        # sum in place where the bucket's own chunk is not needed any more
        total = own.flat if block.into is block.flat else own.new()

        def make(j: int) -> Tensor:
            sent[j] = codec.encode(chunks[j], state, context)
            return sent[j]

        def make_all() -> Sequence[Tensor]:
            nonlocal all_sent
            all_sent = without(codec.encode_each(chunks, state, context), rank)
            return all_sent

        if self.own == "encoded":
            codec.overwrite(make(rank), own.layout, total)
        elif total is not own.flat:
            total.copy_(own.flat)
        add = _Sum(codec, own.layout, total, rank)
        yield from to_owners(codec, chunks, make, add, rank, None if self.own == "encoded" else make_all)
        answer = self._answer(own.like(total.div_(context.size)), block, state, context)
        put = _Put(self.answers, block.like(block.for_mean()).chunks(context.size))
        yield from to_all(self.answers, answer, block.layout, context.size, put)

        def add_sent(into: Tensor, weight: float) -> None:
            for j, chunk in enumerate(block.like(into).chunks(context.size)):
                if j == rank and self.own == "exact":
                    chunk.flat.add_(own.flat, alpha=weight)
                else:
                    wire = sent[j] if all_sent is None else all_sent[j]
                    codec.accumulate(wire, chunk.layout, chunk.flat, weight)

        return ReduceResult(put.mean, add_sent, put.largest)

    def _answer(self, mean: Bucket, block: Bucket, state: State, context: Context) -> Tensor:
        """Encode the mean of this rank's chunk, and store the encoding's error for the next step."""
        again = context._replace(rng=context.rng.again())
        rate = self._rate(context)
        if rate == 0:
            return self.answers.encode(mean, state, again)
        owed = _owed(block, state, context)
        asked = mean if owed is None else mean.with_older(torch.add(mean.flat, owed, out=mean.new()))
        wire = self.answers.encode(asked, state, again)
        books = block.new().zero_()  # of full length, so that it is saved by parameter name
        error = block.like(books).chunks(context.size)[context.rank].flat
        if owed is not None:
            error.copy_(owed)
        error.add_(mean.flat, alpha=rate)
        self.answers.accumulate(wire, mean.layout, error, -rate)
        state["owed"] = books
        return wire

    def _rate(self, context: Context) -> float:
        if context.feedback == 0:  # a memory's step that leaves residuals as they are
            return 0.0
        if self.feedback is not None:
            return self.feedback
        return float(self.answers.needs_feedback) if context.feedback is None else context.feedback


class _Sum(Reader):
    """Adds the other ranks' messages to this rank's chunk."""

    def __init__(self, codec: Codec, layout: Layout, total: Tensor, rank: int) -> None:
        self._codec, self._layout, self._total, self._rank = codec, layout, total, rank

    def __call__(self, rank: int, wire: Tensor) -> None:
        if rank != self._rank:
            self._codec.accumulate(wire, self._layout, self._total, 1.0)

    def all(self, order: Sequence[int], wires: Sequence[Tensor]) -> None:
        others = in_order(wires, [j for j in order if j != self._rank])
        self._codec.accumulate_each(others, self._layout, self._total)


class _Put(EqualReader):
    """Decodes every owner's mean into its chunk of the whole mean."""

    def __init__(self, codec: Codec, parts: Chunks) -> None:
        self._codec, self._parts = codec, parts
        self._scales = list[Tensor | None]()
        self._done: _Put | None = None  # the reader that this one has copied

    def __call__(self, rank: int, wire: Tensor) -> None:
        part = self._parts[rank]
        wire = wire[: self._codec.wire_bytes(part.layout)]  # a shorter message than the longest was padded
        self._codec.overwrite(wire, part.layout, part.flat)
        self._scales.append(self._codec.scales(wire, part.layout))

    def copy(self, read: Any) -> bool:
        if not isinstance(read, _Put) or read._what != self._what:
            return False
        self.mean.copy_(read.mean)
        self._done = read
        return True

    @property
    def mean(self) -> Tensor:
        return self._parts.block.flat

    @cached_property
    def largest(self) -> Tensor | None:
        """Largest magnitude of all chunks, or None if some codec does not tell its scales."""
        if self._done is not None:
            return self._done.largest
        said = [s for s in self._scales if s is not None]
        if len(said) < len(self._scales) or not any(s.numel() for s in said):
            return None
        return torch.cat(said).abs().max()

    @property
    def _what(self) -> Any:
        layout = self._parts.block.layout
        return self._codec, self.mean.dtype, self._parts.edges, layout.segments, layout.knobs


def _owed(block: Bucket, state: State, context: Context) -> Tensor | None:
    """The stored error of this rank's earlier answers, in the bucket's current units."""
    if "owed" not in state:
        return None
    owed = block.like(state["owed"]).chunks(context.size)[context.rank].flat
    return owed if context.rescale == 1 else owed * context.rescale


def to_owners(
    codec: Codec,
    chunks: Chunks,
    make: Callable[[int], Tensor],
    read: Read,
    rank: int,
    make_all: Callable[[], Sequence[Tensor]] | None = None,
) -> Program[None]:
    """Send every chunk to its owner; encode the next one and add the last one while one is in flight."""
    size, own = len(chunks), torch.empty(0, dtype=torch.uint8, device=chunks.block.flat.device)
    lengths = codec.wire_lengths(chunks.block.layout, size)
    if lengths is None:
        made = {j: make(j) for j in send_order(rank, size) if j != rank}
        wires = [made.get(j, own) for j in range(size)]
        answers = yield from all_to_all_ragged(wires, codec.wire_limit(chunks.layouts[rank]))
        for j in receive_order(rank, size):
            read(j, answers[j])
        return
    promised, expected = [*lengths], [lengths[rank]] * size
    promised[rank] = expected[rank] = 0
    promises = LazyWires(lambda j: own if j == rank else make(j), promised)
    yield from read_all_to_all(promises, expected, read, make_all)


def to_all(codec: Codec, wire: Tensor, layout: Layout, size: int, read: Read) -> Program[None]:
    """Send every owner's mean to all `size` ranks; chunks differ by an element or a table entry, so shorter messages are padded.

    `read` gets them with the padding.
    """
    lengths = codec.wire_lengths(layout, size)
    if lengths is None:
        answers = yield from all_gather_ragged(wire, max(codec.wire_limit(c) for c in layout.chunks(size)))
        for j, answer in enumerate(answers):
            read(j, answer)
        return
    padded, longest = wire, max(lengths)
    if wire.numel() < longest:
        padded = wire.new_zeros(longest)
        padded[: wire.numel()] = wire
    yield from read_all_gather(padded, read)
