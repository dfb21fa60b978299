"""Listening: what the ranks' programs ask of the network, and what codecs write into their messages."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from gossamer.bench.explain.numbers import decoded, numbers, octets, raw
from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Codec, Context
from gossamer.core.groups import members, place
from gossamer.core.programs import through
from gossamer.core.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Among,
    Program,
    Send,
    Start,
    TakeTicket,
    Verb,
    WaitQuorum,
)
from gossamer.core.wire import LazyWire


@dataclass
class Message:
    """Something that one rank says."""

    step: int
    way: str  # whose it is, and where it goes
    says: str
    bytes: int = 0  # of the message, each time that it crosses a link
    hex: str = ""
    by: str = ""  # the codec that wrote it


class Written(NamedTuple):
    """A codec's message, and what it says."""

    wire: Tensor
    values: Tensor
    codec: str


@dataclass
class MessageListener:
    """Hears everything, and says it in words."""

    size: int
    messages: list[Message] = field(default_factory=list[Message])
    _written: list["Written"] = field(default_factory=list["Written"])

    def overhear(self, rank: int, program: Program[None], step: Callable[[], int]) -> Program[None]:
        """The same program, heard; what it starts is, too."""

        def ask(verb: Verb) -> Program[Any]:
            if isinstance(verb, Start):
                begun = verb.step
                inner = self.overhear(rank, verb.program, (lambda: begun) if begun else step)
                return (yield replace(verb, program=inner))
            said = self._said(rank, step(), verb)
            self._hear(rank, step(), verb)
            answer = yield said
            self._answered(rank, step(), verb, answer)
            return answer

        return through(program, ask)

    @contextmanager
    def codecs(self) -> Generator[None]:
        """While it lasts, every codec tells what it writes.

        Codecs are frozen values and know nobody, and a controller may make new ones at any step: so it is their classes that are
        listened to.
        """
        kinds = [kind for kind in _kinds(Codec) if "encode" in vars(kind)]
        before = {kind: kind.encode for kind in kinds}
        for kind in kinds:
            setattr(kind, "encode", self._telling(before[kind]))  # noqa: B010
        try:
            yield
        finally:
            for kind, encode in before.items():
                setattr(kind, "encode", encode)  # noqa: B010

    def _telling(self, encode: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def told(codec: Codec, block: Bucket, state: State, context: Context) -> Tensor:
            wire = encode(codec, block, state, context)
            self._written.append(Written(wire.clone(), codec.decode(wire, block), repr(codec)))
            return wire

        return told

    def _said(self, rank: int, step: int, verb: Verb) -> Verb:
        """The request with its promises overheard: they are kept when their turn comes."""
        if not isinstance(verb, AllToAll):
            return verb
        ranks, (index, _) = members(verb, self.size), place(verb, rank, self.size)

        def kept(j: int, promise: LazyWire) -> LazyWire:
            def make() -> Tensor:
                wire = promise.make()
                self._wire(rank, step, f"to rank {ranks[j]}", wire)
                return wire

            return replace(promise, make=make)

        wires = [kept(j, w) if isinstance(w, LazyWire) and j != index else w for j, w in enumerate(verb.wires)]
        return replace(verb, wires=wires, make_all=None)  # made one by one, so that each is heard

    def _hear(self, rank: int, step: int, verb: Verb) -> None:
        match verb:
            case AllReduce(tensor, op, among):
                what = {"sum": "into a sum", "max": "into a maximum", "min": "into a minimum"}[op]
                length = tensor.numel() * tensor.element_size()
                self._note(rank, step, f"{what} over {_whom(among)}", numbers(tensor), length)
            case AllGather(wire, among=among):
                self._wire(rank, step, f"to {_whom(among)}", wire)
            case AllToAll(wires, among=among):
                ranks, (index, _) = members(verb, self.size), place(verb, rank, self.size)
                for j, wire in enumerate(wires):
                    if isinstance(wire, Tensor) and j != index and wire.numel():
                        self._wire(rank, step, f"to rank {ranks[j]}", wire)
            case Send(to, wire):
                self._wire(rank, step, f"to rank {members(verb, self.size)[to]}", wire)
            case _:
                pass

    def _answered(self, rank: int, step: int, verb: Verb, answer: Any) -> None:
        match verb:
            case AllReduce(among=among) if rank == members(verb, self.size)[0]:
                self.messages.append(Message(step, f"comes out of it, on {_whom(among)}", numbers(answer)))
            case TakeTicket(name):
                self._note(rank, step, f"draws a ticket of {name!r}", f"number {answer}")
            case WaitQuorum(name):
                who = ", ".join(map(str, answer))
                self._note(rank, step, f"sees who drew the tickets of {name!r}", f"rank{'s' * (len(answer) > 1)} {who}")
            case _:
                pass

    def _wire(self, rank: int, step: int, way: str, wire: Tensor) -> None:
        read = self._read(wire)
        says = "; and ".join(says for says, _ in read) or raw(wire)
        by = " and ".join(dict.fromkeys(codec for _, codec in read))
        self._note(rank, step, way, says, wire.numel(), octets(wire), by)

    def _read(self, wire: Tensor) -> list[tuple[str, str]]:
        """What codecs have written into it, one after the other, and which; nothing if it is not all theirs.

        What is left may be zeros: a wire that travels beside a longer one is filled up.
        """
        found, at = list[tuple[str, str]](), 0
        while at < wire.numel():
            known = next((w for w in reversed(self._written) if _begins(wire[at:], w.wire)), None)
            if known is None:
                return [] if wire[at:].any() else found
            found.append((decoded(known.values), known.codec))
            at += known.wire.numel()
        return found

    def _note(self, rank: int, step: int, way: str, says: str, *bytes_of: Any) -> None:
        self.messages.append(Message(step, f"rank {rank} {way}", says, *bytes_of))


def _begins(wire: Tensor, written: Tensor) -> bool:
    n = written.numel()
    return 0 < n <= wire.numel() and bool((wire[:n] == written).all())


def _whom(among: Among) -> str:
    return "all ranks" if among is None else f"ranks {', '.join(map(str, among))}"


def _kinds(kind: type[Codec]) -> Iterator[type[Codec]]:
    for each in kind.__subclasses__():
        yield each
        yield from _kinds(each)
