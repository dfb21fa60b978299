"""Records a dry run: what its training loop does, and what the programs ask for that it starts."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from time import thread_time
from typing import Any

from gossamer.core.canned_answers import answer_of
from gossamer.core.programs import drive
from gossamer.core.verbs import Handle, Join, Program, Start, Verb
from gossamer.planning.events import Busy, Event, Launch, Request, Wait


class EventRecorder:
    """The events of a training loop, in their order; if `timed`, with the seconds that the schedule itself computes."""

    def __init__(self, timed: bool) -> None:
        self.events = list[Event]()
        self._timed, self._keys = timed, count()
        self._began: float | None = None  # the thread's processor time when the schedule's work not noted yet began

    def note(self, event: Event) -> None:
        self._lap()
        self.events.append(event)

    def launch(self, *requests: Request, lane: str = "comm") -> Launch:
        """Note that a program with these requests starts."""
        launched = Launch(next(self._keys), lane, [*requests])
        self.note(launched)
        return launched

    def begin(self, *requests: Request, lane: str = "comm") -> int:
        """The key of a program that is launched with these requests."""
        return self.launch(*requests, lane=lane).key

    def wait(self, keys: Iterable[int]) -> None:
        self.note(Wait(tuple(keys)))

    @contextmanager
    def working(self) -> Generator[None]:
        """While it is open, what is computed is the schedule's own work."""
        self._began = thread_time() if self._timed else None
        yield
        self._lap()
        self._began = None

    @contextmanager
    def apart(self) -> Generator[None]:
        """While it is open, another thread computes."""
        self._lap()
        busy, self._began = self._began is not None, None
        yield
        self._began = thread_time() if busy else None

    def _lap(self) -> None:
        """Note what the schedule has computed since the last event."""
        if self._began is not None:
            began, self._began = self._began, thread_time()
            if self._began > began:
                self.events.append(Busy(self._began - began))


@dataclass(eq=False)
class DeferredProgram(Handle[Any]):
    """A program that runs when it is joined, or when its result is requested."""

    program: Program[Any]
    key: int = 0
    result: Any = None
    ended: bool = False
    requests: list[Request] = field(default_factory=list[Request])

    def done(self) -> bool:
        return self.ended


class DeferredPrograms:
    """Runs the programs of comm threads with canned answers, and records their requests."""

    def __init__(self, recorder: EventRecorder, size: int) -> None:
        self._recorder, self._size = recorder, size
        self._last: DeferredProgram | None = None  # the program started last
        self._running = list[Request]()  # the requests of the deferred program that runs now

    def ask(self, request: Request) -> None:
        """Record a request of the program that runs."""
        self._running.append(request)

    def start(self, verb: Start) -> DeferredProgram:
        launch = self._recorder.launch(lane=verb.lane)
        self._last = DeferredProgram(verb.program, launch.key, requests=launch.requests)
        return self._last

    def end(self, handle: DeferredProgram, sent: list[Verb]) -> Any:
        """The result of a started program, which runs now if it has not yet."""
        if not handle.ended:
            before, self._running = self._running, handle.requests
            with self._recorder.apart():
                handle.result, handle.ended = self.run(handle.program, sent), True
            self._running = before
        return handle.result

    def end_last(self, sent: list[Verb]) -> None:
        if self._last is not None:
            self.end(self._last, sent)

    def run(self, program: Program[Any], sent: list[Verb]) -> Any:
        """Run a program and record its requests, except those of exchanges, whose size depends on the model."""

        def answer(verb: Verb) -> Any:
            match verb:
                case Start():
                    return self.start(verb)
                case Join(DeferredProgram() as handle):
                    return self.end(handle, sent)
                case _:
                    sent.append(verb)
                    self.ask(verb)
                    return answer_of(verb, self._size)

        return drive(program, answer)
