"""The processor time of a recipe's programs: measured on this machine, or counted as passes over memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter, thread_time
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.canned_answers import answer_with_wires
from gossamer.core.contracts import Context
from gossamer.core.groups import place
from gossamer.core.programs import drive
from gossamer.core.rng import CounterRng
from gossamer.core.verbs import AllGather, AllToAll, Program, Verb

LATER = 10**9  # the step whose programs are planned, after any codec's warm-up
REPEATS = 3  # times a program runs; the fastest counts
MEASURED = 4_000_000  # elements of a bucket that are measured; what a longer one takes is scaled
FAMILY = 8_000_000  # elements of like buckets that are measured; others take as long an element
WORLDS = (2, 4, 8)  # numbers of ranks at which work is measured; beyond, it is extrapolated on a line


class Work(NamedTuple):
    """The processor time of one request: before it, and while it is under way."""

    before: float
    inside: float


class WorkSource(Protocol):
    """Where the processor time of a program comes from."""

    name: str

    def of(self, program: "Planned", size: int, verbs: Sequence[Verb]) -> list[Work]:
        """The work before each request, and one more after the last."""
        ...


States = tuple[State, State]  # of a memory, and of an exchange; a mixer has the first
Run = Callable[[Bucket, Context, States, bool], Program[Any]]


@dataclass(frozen=True)
class Planned:
    """A program of one bucket, which can be run at any size, on tensors with numbers or without (then only sizes are computed)."""

    layout: Layout
    family: tuple[Any, ...]  # programs of one family take the same time an element
    run: Run
    per_node: int = 1  # ranks that average as one: what is computed depends on the number of nodes


def context_of(size: int, step: int = LATER) -> Context:
    return Context(0, size, step, CounterRng(0, step, 0))


# -- where work comes from --------------------------------------------------------------------------------------------------


@dataclass
class NoWork:
    """Programs whose processor time does not count: for the network's own share of a step."""

    name: str = "none"

    def of(self, program: Planned, size: int, verbs: Sequence[Verb]) -> list[Work]:
        return [Work(0.0, 0.0)] * (len(verbs) + 1)


@dataclass
class MemoryPasses:
    """Work as passes over memory: a gradient is read, states are read and written, wires are written, read and added up.

    Nothing is measured: it stands for GPUs that are not here.
    """

    rate: float  # bytes per second
    launch: float = 2e-5  # seconds of a kernel's launch
    name: str = "passes over memory, not measured"

    def of(self, program: Planned, size: int, verbs: Sequence[Verb]) -> list[Work]:
        dense = 4 * program.layout.numel
        first = 2 * dense if verbs else 0
        out = [Work((first + _written(verbs[0]) if verbs else 0) / self.rate + self.launch, 0.0)]
        for verb, then in zip(verbs, [*verbs[1:], None]):
            read = _read(verb, size)
            touched = min(2 * dense, 16 * read) + read * (1 + 15 * (read > dense)) + _written(then)
            out.append(Work(touched / self.rate + self.launch, 0.0))
        return out


def _written(verb: Verb | None) -> int:
    match verb:
        case AllGather(wire):
            return wire.numel()
        case AllToAll():
            return sum(verb.sent)
        case _:
            return 0


def _read(verb: Verb, size: int) -> int:
    match verb:
        case AllGather(wire):
            return wire.numel() * place(verb, 0, size)[1]
        case AllToAll(_, lengths):
            return sum(lengths)
        case _:
            return 0


@dataclass
class MeasuredWork:
    """Work measured here: one rank runs each program with real codecs, as if all other ranks sent the same."""

    name: str = "measured on this machine"
    seconds: float = 0.0  # that measuring took
    clock: Callable[[], float] = thread_time
    device: str = "cpu"
    _known: dict[Any, list[Work]] = field(default_factory=dict[Any, list[Work]])
    _families: dict[Any, list[tuple[int, list[Work]]]] = field(default_factory=dict[Any, list[tuple[int, list[Work]]]])

    @classmethod
    def on_gpu(cls) -> "MeasuredWork":
        """On this machine's GPU. Each time ends when the GPU is done, so it holds the launches too."""

        def done() -> float:
            torch.cuda.synchronize()
            return perf_counter()

        return cls("measured on this machine's GPU", clock=done, device="cuda")

    def of(self, program: Planned, size: int, verbs: Sequence[Verb]) -> list[Work]:
        began, nodes = thread_time(), size // program.per_node
        if nodes <= WORLDS[-1]:
            found = self._at(program, size)
        else:
            less, more = (self._at(program, n * program.per_node) for n in WORLDS[1:])
            found = [on_a_line(a, b, nodes) for a, b in zip(less, more)] if len(less) == len(more) else more
        self.seconds += thread_time() - began
        return _spread(found, len(verbs) + 1)

    def measured(self, program: Planned, size: int, layout: Layout | None = None) -> list[Work]:
        """Run a program a few times, on and on with its state, in a world of so many ranks; the fastest time of each piece."""
        layout = layout or program.layout
        states: States = {}, {}
        flat = heavy_tailed(layout).to(self.device)
        runs = list[list[Work]]()
        for step in range(REPEATS + 1):
            context = context_of(size, LATER + step)
            runs.append(_timed(program.run(Bucket(flat.clone(), layout), context, states, False), size, self.clock))
        runs = [run for run in runs[1:] if len(run) == len(runs[-1])]
        return [Work(min(w.before for w in piece), min(w.inside for w in piece)) for piece in zip(*runs)]

    def _at(self, program: Planned, size: int) -> list[Work]:
        layout, numel = shortened(program.layout), program.layout.numel
        key = program.family, size, tuple(s.shape for s in layout.segments), layout.dtype
        if key not in self._known:
            family = self._families.setdefault((program.family, size), [])
            if sum(n for n, _ in family) > FAMILY:
                n, like = min(family, key=lambda known: abs(known[0] - layout.numel))
                return _scaled(like, numel / n)
            self._known[key] = self.measured(program, size, layout)
            family.append((layout.numel, self._known[key]))
        return _scaled(self._known[key], numel / layout.numel)


def _timed(program: Program[Any], size: int, clock: Callable[[], float]) -> list[Work]:
    """The time between the requests of a program, and within them."""
    out, began = list[Work](), clock()

    def answer(verb: Verb) -> Any:
        nonlocal began
        asked = clock()
        reply = answer_with_wires(verb, place(verb, 0, size)[1])
        answered = clock()
        # Answering costs next to nothing but where wires are made and read.
        inside = answered - asked if isinstance(verb, AllGather | AllToAll) else 0.0
        out.append(Work(asked - began, inside))
        began = clock()
        return reply

    drive(program, answer)
    return [*out, Work(clock() - began, 0.0)]


def on_a_line(less: Work, more: Work, size: int) -> Work:
    """Extrapolate from the last two of `WORLDS` to more ranks."""
    (_, a, b) = WORLDS
    return Work(*(beyond((a, x), (b, y), size) for x, y in zip(less, more)))


def beyond(less: tuple[int, float], more: tuple[int, float], size: int) -> float:
    """The seconds of `size` ranks, from those of fewer; work that fell, or rose by under 3 %, does not grow."""
    (a, x), (b, y) = less, more
    return y + (y - x) / (b - a) * (size - b) if y > 1.03 * x else y


def _scaled(works: Sequence[Work], factor: float) -> list[Work]:
    return [Work(w.before * factor, w.inside * factor) for w in works]


def _spread(works: list[Work], pieces: int) -> list[Work]:
    """The same work over another number of requests: a tree has more levels where there are more ranks."""
    if len(works) == pieces:
        return works
    before, inside = sum(w.before for w in works) / pieces, sum(w.inside for w in works) / pieces
    return [Work(before, inside)] * pieces


def shortened(layout: Layout) -> Layout:
    """The first parameters of a bucket, with at most `MEASURED` elements; the first one is cut if it is longer."""
    if layout.numel <= MEASURED:
        return layout
    shapes, total = dict[str, tuple[int, ...]](), 0
    for s in layout.segments:
        if total + s.numel > MEASURED:
            rows = max((MEASURED - total) // max(s.row, 1), 1)
            if not shapes:
                shapes[s.name] = (min(rows, s.shape[0]), *s.shape[1:])
            break
        shapes[s.name], total = s.shape, total + s.numel
    return Layout.of(shapes, layout.dtype)


def heavy_tailed(layout: Layout) -> Tensor:
    """Numbers as gradients have them: Student's t with 3 degrees of freedom."""
    noise = torch.Generator().manual_seed(0)
    normal = torch.randn(4, layout.numel, generator=noise, dtype=torch.float32)
    return (normal[0] / normal[1:].square().mean(0).sqrt().clamp_(min=1e-3)).mul_(1e-3).to(layout.dtype)
