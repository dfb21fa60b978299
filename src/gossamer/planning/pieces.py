"""Cuts the programs of a recipe into pieces: work of the processor, then a request of the network.

The requests are those that rank 0 makes in the asked world.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.canned_answers import answer_of
from gossamer.core.contracts import Context, ReduceResult
from gossamer.core.groups import place
from gossamer.core.loop import Message
from gossamer.core.programs import drive
from gossamer.core.verbs import AllGather, AllReduce, AllToAll, Program, Shared, TakeTicket, Verb, WaitQuorum
from gossamer.costs import Cluster, Crossing, crossing_of
from gossamer.planning.events import AverageRequest, MessageRequest, Request, StateRequest
from gossamer.planning.sizes_only import sizes_only
from gossamer.planning.work import Planned, States, Work, WorkSource, context_of, heavy_tailed, shortened
from gossamer.recipe import Recipe
from gossamer.runtime.buckets import BucketState, build
from gossamer.runtime.optimizer_state import requests
from gossamer.runtime.params import params_of

SMALL = Layout.of({"x": (1,)})
FEW, MANY = 64, 512  # ranks: requests of more than MANY follow from those of FEW and of twice as many
COLLECTIVES = (AllReduce, AllGather, AllToAll)


class Piece(NamedTuple):
    """Processor seconds, then a request; `inside` is the processor time of wires that are made or read while it is under way.

    `opens` and `needs` name a ticket that the request takes, or waits for.
    """

    work: float
    crossing: Crossing | None
    inside: float = 0.0
    opens: str = ""
    needs: str = ""


# -- the pieces of a recipe -------------------------------------------------------------------------------------------------


class Programs:
    """The programs of a recipe on a model, for rank 0 of a cluster, cut into pieces.

    With `sharing`, the cluster's ranks form so many worlds that share each node's card: the shards of a model, of which each rank
    has one.
    """

    def __init__(
        self,
        recipe: Recipe,
        shapes: Mapping[str, tuple[int, ...]],
        cluster: Cluster,
        work: WorkSource,
        *,
        sharing: int = 1,
        momenta: int = 1,
    ) -> None:
        parameters = {n: torch.empty(s, device="meta", dtype=torch.float32) for n, s in shapes.items()}
        self.recipe, self.cluster, self.work, self.sharing, self.momenta = recipe, cluster, work, sharing, momenta
        self.size = cluster.size // sharing
        self.buckets = build(recipe, params_of(parameters), dict.fromkeys(parameters, 0), self.size)
        self.estimated = False  # bytes of wires whose length depends on the data
        mixer = recipe.schedule.shape.mixer
        self._begins = mixer is not None and mixer.begins
        self._known = dict[Any, tuple[Piece, ...]]()
        self._held = dict[Any, int]()  # bytes that a program keeps
        self._states = dict[int, int]()  # by bucket, those of its memory, exchange and mixer

    def pieces(self, asked: Iterable[Request]) -> tuple[Piece, ...]:
        """The pieces of a program that makes these requests."""
        return tuple(piece for request in asked for piece in self._of(request))

    def _of(self, request: Request) -> tuple[Piece, ...]:
        match request:
            case AverageRequest(which, over):
                return tuple(p for i in which for p in self._cut(i, self._average(self.buckets[i], over)))
            case MessageRequest(which, message):
                planned = self._message(message)
                return tuple(p for i in which for p in self._cut(i, planned(self.buckets[i].layout)))
            case StateRequest():
                verbs = requests([b.layout for b in self.buckets], request.buffers(self.momenta))
                return tuple(Piece(0.0, self._crossing(verb)) for verb in verbs)
            case _:
                return (self._plain(request),)

    @property
    def state_bytes(self) -> int:
        """Bytes that memories, exchanges and mixers keep for all buckets."""
        return sum(self._states.values())

    def _plain(self, verb: Verb) -> Piece:
        crossing = self._crossing(verb) if isinstance(verb, Shared) else None
        opens = verb.name if isinstance(verb, TakeTicket) else ""
        needs = verb.name if isinstance(verb, WaitQuorum) else ""
        return Piece(0.0, crossing, opens=opens, needs=needs)

    def _crossing(self, verb: Shared) -> Crossing:
        return crossing_of(verb, 0, self.cluster, self.size, self.sharing)

    def _average(self, bucket: BucketState, over: Any) -> Planned:
        by = bucket.exchange if over is None else over

        def run(block: Bucket, context: Context, states: States, hollow: bool) -> Program[Any]:
            memory, exchange = states
            through = sizes_only(by) if hollow else by

            def send(block: Bucket, context: Context) -> Program[ReduceResult]:
                return through.average(block, exchange, context)

            block = Bucket(block.flat, block.layout, block.flat)
            return send(block, context) if over is not None else bucket.memory.around(block, memory, send, context)

        return Planned(bucket.layout, ("average", by, None if over else bucket.memory), run, by.ranks_per_node)

    def _message(self, message: Message) -> Callable[[Layout], Planned]:
        """How a message is sent of a bucket of some layout."""

        def run(block: Bucket, context: Context, states: States, hollow: bool) -> Program[Any]:
            return message(block, states[0], context)

        # Messages alike in what they send of one number are alike for all buckets.
        verbs, _ = self._requests(Planned(SMALL, (), run), SMALL, torch.zeros(1, dtype=torch.float32))
        small, schedule = tuple(self._crossing(v) for v in verbs if isinstance(v, Shared)), self.recipe.schedule
        return lambda layout: Planned(layout, ("message", schedule, small), run, schedule.ranks_per_node)

    def _cut(self, bucket: int, program: Planned) -> tuple[Piece, ...]:
        layout = program.layout
        key = program.family, tuple(s.shape for s in layout.segments), layout.dtype, layout.knobs
        if key not in self._known:
            verbs, factor, states = self._verbs(program)
            crossings = [self._crossing(v).times(factor) for v in verbs if isinstance(v, Shared)]
            self._known[key] = tuple(_merged(crossings, self.work.of(program, self.size, verbs)))
            self._held[key] = round(factor * states)
        self._states[bucket] = max(self._states.get(bucket, 0), self._held[key])
        return self._known[key]

    def _verbs(self, program: Planned) -> tuple[list[Verb], float, int]:
        """The requests of a program, how many times their bytes the whole bucket has, and the bytes of its states."""
        layout = program.layout
        try:
            if (found := self._of_many(program)) is not None:
                return found
            verbs, states = self._hollow(program, layout, self.size)
            return verbs, 1.0, states
        except (RuntimeError, NotImplementedError, TypeError):  # what it sends depends on the numbers
            short = shortened(layout)
            self.estimated = True
            verbs, states = self._requests(program, short, heavy_tailed(short))
            return verbs, layout.numel / short.numel, states

    def _of_many(self, program: Planned) -> tuple[list[Verb], float, int] | None:
        """The requests in a world of very many ranks, from those in two small worlds.

        A wire that is as long in both is one of the whole bucket; any other is one of a rank's chunk, and is as long as in a
        small world with chunks of that length. None if ranks meet in groups, or more often where there are more of them.
        """
        layout, size = program.layout, self.size
        if size <= MANY or program.family[0] == "message":  # which goes from rank to rank
            return None
        less, states = self._hollow(program, layout, FEW)
        if not all(isinstance(v, COLLECTIVES) and v.among is None for v in less):
            return None
        more, _ = self._hollow(program, layout, 2 * FEW)
        part = Layout.of({layout.name: (ceil(layout.numel * FEW / size),)}, layout.dtype)
        cut, _ = self._hollow(program, part, FEW)
        if not len(less) == len(more) == len(cut):
            return None
        rows = zip(less, more, cut, strict=True)
        return [_among(a if _length(a) == _length(b) else c, size) for a, b, c in rows], 1.0, states

    def _hollow(self, program: Planned, layout: Layout, size: int) -> tuple[list[Verb], int]:
        return self._requests(program, layout, torch.empty(layout.numel, device="meta", dtype=layout.dtype), size)

    def _requests(
        self, program: Planned, layout: Layout, flat: Tensor, size: int | None = None
    ) -> tuple[list[Verb], int]:
        verbs, states, size = list[Verb](), (State(), State()), size or self.size

        def answer(verb: Verb) -> Any:
            verbs.append(verb)
            return answer_of(verb, place(verb, 0, size)[1])

        if self._begins:
            drive(program.run(Bucket(flat, layout), context_of(size), states, True), answer)
        verbs.clear()
        drive(program.run(Bucket(flat, layout), context_of(size), states, True), answer)
        held = sum(t.nbytes for state in states for t in state.values())
        return verbs, held


def _length(verb: Verb) -> int:
    """The bytes of a collective's tensor, of its wire, or of its wire to the next rank."""
    match verb:
        case AllReduce(tensor):
            return tensor.nbytes
        case AllGather(wire):
            return wire.numel()
        case AllToAll(wires):
            return wires[1].numel()
        case _:
            return 0


def _among(verb: Verb, size: int) -> Verb:
    """The same collective among `size` ranks, with the wire of one pair of ranks for each pair."""
    if not isinstance(verb, AllToAll):
        return verb
    return AllToAll([verb.wires[1]] * size, [verb.wires[1].numel()] * size)


def _merged(crossings: Sequence[Crossing], works: Sequence[Work]) -> Iterable[Piece]:
    """Pieces of one program. Messages that are sent travel while those that are awaited do, so they are one piece."""
    sent: Crossing | None = None
    before = ahead = 0.0  # ahead: bytes sent beyond those that were awaited
    for crossing, work in zip(crossings, works):
        before += work.before
        if crossing.pattern == "one" and crossing.sent:  # the sender goes on at once
            sent = crossing if sent is None else _both(sent, crossing)
            continue
        if crossing.pattern == "one" and 0 < crossing.card <= ahead:  # it came while this rank's own were on their way
            crossing, ahead = Crossing("one"), ahead - crossing.card
        if sent is not None:
            ahead += max(sent.card - crossing.card, 0.0)
            crossing, sent = _both(sent, crossing), None
        yield Piece(before, crossing, work.inside)
        before = 0.0
    last = before + works[-1].before
    if sent is not None or last:
        yield Piece(last, sent)


def _both(sent: Crossing, awaited: Crossing) -> Crossing:
    """Messages that travel at once, each way; what is awaited was sent as this rank's own."""
    longer = max(sent, awaited, key=lambda c: (c.card, c.inside, c.messages))
    return Crossing(
        longer.pattern,
        longer.messages,
        longer.between,
        sent.sent + awaited.sent,
        max(sent.card, awaited.card) if awaited.sent == 0 else sent.card + awaited.card,
        max(sent.inside, awaited.inside),
    )


def cut_shards(shapes: Mapping[str, tuple[int, ...]], shards: int) -> dict[str, tuple[int, ...]]:
    """The part of each parameter that one of `shards` ranks holds: its first dimension is cut."""
    return {n: (ceil(s[0] / shards), *s[1:]) if s else s for n, s in shapes.items()}
