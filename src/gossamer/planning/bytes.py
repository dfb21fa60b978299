"""The bytes per step: those of each request of the schedule, times how often it is made."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.codecs.warm import codecs_in
from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.canned_answers import answer_of
from gossamer.core.contracts import Codec, Context, ReduceResult
from gossamer.core.groups import place
from gossamer.core.loop import Message
from gossamer.core.programs import drive
from gossamer.core.rng import CounterRng
from gossamer.core.verbs import Program, Verb
from gossamer.costs.crossing import traffic
from gossamer.fabrics.ledger import Ledger
from gossamer.fabrics.sim import simulate
from gossamer.planning.dry_run import DryRun, span
from gossamer.planning.events import AverageRequest, MessageRequest
from gossamer.planning.sizes_only import sizes_only
from gossamer.planning.work import LATER
from gossamer.recipe import Recipe
from gossamer.runtime.buckets import BucketState, build
from gossamer.runtime.optimizer_state import requests
from gossamer.runtime.params import params_of

SMALL = Layout.of({"x": (1,)})
Momenta = int | Callable[[], int]
"""How many tensors the optimizer keeps of each parameter; a function is only called where a schedule averages them."""


def bytes_per_step(
    recipe: "str | Recipe", shapes: "Mapping[str, tuple[int, ...] | Tensor]", size: int, *, momenta: Momenta = 1
) -> float:
    """The bytes that one rank of `size` sends per step, averaged over ranks and over whole rounds of the schedule.

    `shapes` may hold the parameters themselves: `dict(model.named_parameters())`. Where the schedule averages the optimizer's
    state as well (`slowmo(48, buffers="average")`), that is `momenta` tensors of each parameter: none for plain SGD, one with
    momentum, two for Adam. A warm-up is not in it, nor are the steps in which `gradiveq` learns.

    >>> bytes_per_step("allreduce", {"w": (1000,)}, 4)
    6000.0
    >>> bytes_per_step("slowmo(12)", {"w": (1000,)}, 4)
    500.0
    >>> bytes_per_step("allreduce + slowmo(12, buffers='average')", {"w": (1000,)}, 4, momenta=2)
    1502.0
    """
    count, steps = _counted(recipe, shapes, size, 1, momenta)
    return count.sent / size / steps


def bytes_between(
    recipe: "str | Recipe",
    shapes: "Mapping[str, tuple[int, ...] | Tensor]",
    size: int,
    per_node: int,
    *,
    momenta: Momenta = 1,
) -> float:
    """The bytes that one node of `per_node` ranks sends to other nodes per step, averaged over nodes.

    >>> bytes_between("allreduce", {"w": (1000,)}, 4, per_node=2)
    6000.0
    >>> bytes_between("nodes(allreduce(fp32()), 2)", {"w": (1000,)}, 4, per_node=2)
    4000.0
    """
    count, steps = _counted(recipe, shapes, size, per_node, momenta)
    return (count.sent - count.inside) / ceil(size / per_node) / steps


class Count(NamedTuple):
    """The bytes that all ranks send together, and how many of them stay within a node."""

    sent: int = 0
    inside: int = 0

    def times(self, often: int) -> "Count":
        return Count(often * self.sent, often * self.inside)


def _sum(counts: Iterable[Count]) -> Count:
    sent, inside = 0, 0
    for count in counts:
        sent, inside = sent + count.sent, inside + count.inside
    return Count(sent, inside)


def _counted(
    recipe: "str | Recipe", shapes: "Mapping[str, tuple[int, ...] | Tensor]", size: int, per_node: int, momenta: Momenta
) -> tuple[Count, int]:
    """The bytes of whole rounds of the schedule, and the number of their steps."""
    parsed = Recipe.of(recipe)
    parameters = {
        n: torch.empty(s, device="meta", dtype=torch.float32) if isinstance(s, tuple) else s for n, s in shapes.items()
    }
    parsed = parsed.bound({n: tuple(p.shape) for n, p in parameters.items()})
    buckets = build(parsed, params_of(parameters), dict.fromkeys(parameters, 0), size)
    parsed.fits(Binding(size, [c.layout for c in buckets]))
    first, last = span(parsed)
    run = DryRun.of(parsed, buckets, size)
    while run.step <= last:
        run.take_step()
    mixer = parsed.schedule.shape.mixer
    counter = _Counter(buckets, size, per_node, begins=mixer is not None and mixer.begins)
    done = [counter.averaged(run.averages), counter.mailed(run.mail), counter.asked(run.besides)]
    if run.pooled:
        kept = momenta if isinstance(momenta, int) else momenta()
        layouts = [c.layout for c in buckets]
        done += [counter.asked(requests(layouts, asked.buffers(kept))) for asked in run.pooled]
    return _sum(done), last - first + 1


class _Counter:
    """Runs each request of a schedule once, by one rank after the other, and counts its bytes."""

    def __init__(self, buckets: Sequence[BucketState], size: int, per_node: int, begins: bool) -> None:
        self._channels, self._size, self._per_node = buckets, size, per_node
        self._begins = begins  # a mixer's first messages differ from all others

    def averaged(self, averages: Iterable[AverageRequest]) -> Count:
        """Count averages. Averages of the same buckets send the same each time."""
        return _sum(self._average(asked).times(often) for asked, often in Counter(averages).items())

    def mailed(self, mail: Iterable[MessageRequest]) -> Count:
        """Count messages. Those that send as many bytes as others for a small bucket send as many for a large one too,
        so they are encoded once.
        """
        known, done = dict[Any, Count](), list[Count]()
        for which, message in mail:

            def program(
                bucket: BucketState, flat: Tensor, context: Context, message: Message = message
            ) -> Program[Any]:
                return self._said(message, Bucket(flat, bucket.layout), context)

            contexts = [_context(rank, self._size) for rank in range(self._size)]
            small = tuple(
                self._alone(self._said(message, Bucket(torch.zeros(1, dtype=torch.float32), SMALL), context), context)
                for context in contexts
            )
            if (which, small) not in known:
                known[which, small] = self._sent(program, which)
            done.append(known[which, small])
        return _sum(done)

    def _said(self, message: Message, block: Bucket, context: Context) -> Program[Any]:
        kept: State = {}
        if self._begins:
            _done(message(block, kept, context), context.size)
        return message(block, kept, context)

    def asked(self, verbs: Iterable[Verb]) -> Count:
        """Count requests whose length does not depend on the model."""
        return _sum(self._moved(verb, rank) for verb in verbs for rank in range(self._size))

    def _average(self, asked: AverageRequest) -> Count:
        def program(bucket: BucketState, flat: Tensor, context: Context) -> Program[Any]:
            block = Bucket(flat, bucket.layout)
            return _averaging(bucket, block, context) if asked.over is None else asked.over.average(block, {}, context)

        return self._sent(program, asked.which)

    def _sent(self, program: Callable[[BucketState, Tensor, Context], Program[Any]], which: Iterable[int]) -> Count:
        """Count the bytes of the program for these buckets; equal buckets are run once."""
        done, like = list[Count](), dict[Any, list[BucketState]]()
        for c in (self._channels[i] for i in which):
            shapes = tuple(s.shape for s in c.layout.segments)
            like.setdefault((shapes, c.layout.dtype, c.layout.knobs, c.exchange, c.memory), []).append(c)
        for bucket, *others in like.values():
            noise = torch.Generator().manual_seed(0)
            flat = torch.empty(bucket.layout.numel, dtype=bucket.layout.dtype).uniform_(-1, 1, generator=noise)
            contexts = [_context(rank, self._size, bucket.shift) for rank in range(self._size)]
            programs = (program(bucket, flat, context) for context in contexts)
            if _hears_lengths(bucket, self._size):
                ledger = simulate([*programs], ledger=Ledger(per_node=self._per_node)).ledger
                once = Count(ledger.sent, ledger.inside)
            else:
                once = _sum(self._alone(p, context) for p, context in zip(programs, contexts))
            done.append(once.times(1 + len(others)))
        return _sum(done)

    def _alone(self, program: Program[Any], context: Context) -> Count:
        """Count what a rank sends if every other rank answers as it would itself."""
        done = list[Count]()

        def answer(verb: Verb) -> Any:
            done.append(self._moved(verb, context.rank))
            return answer_of(verb, place(verb, context.rank, self._size)[1])

        drive(program, answer)
        return _sum(done)

    def _moved(self, verb: Verb, rank: int) -> Count:
        moved = traffic(verb, rank, self._size, self._per_node)
        return Count(moved.sent, moved.inside)


def _hears_lengths(bucket: BucketState, size: int) -> bool:
    """True if a rank announces wire lengths that others in its group cannot know."""
    codecs = [c for c in codecs_in(bucket.exchange) if isinstance(c, Codec)]
    return bool(bucket.exchange.groups(size)) and any(c.wire_bytes(bucket.layout) is None for c in codecs)


def _context(rank: int, size: int, shift: float = 0.0) -> Context:
    return Context(rank, size, LATER, CounterRng(0, 1, rank), shift=shift)


def _averaging(bucket: BucketState, block: Bucket, context: Context) -> Program[Any]:
    exchange, kept = sizes_only(bucket.exchange), State()

    def send(block: Bucket, context: Context) -> Program[ReduceResult]:
        return exchange.average(block, {}, context)

    if bucket.memory.begins:
        _done(bucket.memory.around(block, kept, send, context), context.size)
    return (yield from bucket.memory.around(block, kept, send, context))


def _done(program: Program[Any], size: int) -> None:
    """Run a program to its end without counting."""
    drive(program, lambda verb: answer_of(verb, size))
