"""Memory that several streams share: races, and blocks that are handed out again too early.

A race: a stream reads what another wrote, or writes what another wrote or read, and does not know that the other is done.

A lifetime: the allocator hands a freed block out again in the order of the stream on which it was allocated. So when the
last tensor on it is gone, that stream must know that all others are done with it, unless they were recorded with
`record_stream`.
"""

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.gpu.clocks import Stream, finished
from tests.gpu.diary import diary, lock, place
from torch import Tensor

SMALL = 64  # bytes; a lone number that is read late is a number that was read


class Use(NamedTuple):
    stream: Stream
    moment: int
    place: str


@dataclass
class Story:
    """What outlives the memory itself: who used it."""

    length: int
    home: Stream | None  # where it was allocated; None: on the host
    born: str
    written: Use | None = None
    reads: dict[Stream, Use] = field(default_factory=dict[Stream, Use])
    recorded: set[Stream] = field(default_factory=set[Stream])

    def uses(self) -> Iterator[Use]:
        yield from self.reads.values()
        if self.written is not None:
            yield self.written


class Memory:
    """One storage. Times are compared when a use begins, under the lock."""

    def __init__(self, length: int, home: Stream | None) -> None:
        self.story = Story(length, home, place(2))
        if home is not None:
            diary.grows(length)
            weakref.finalize(self, _freed, self.story).atexit = False

    def read(self, use: Use) -> None:
        written = self.story.written
        if written is not None and not use.stream.knows(written.stream, written.moment):
            _race(f"{use.stream} reads at {use.place} what {written.stream} writes at {written.place}")
        self.story.reads[use.stream] = use

    def write(self, use: Use) -> None:
        for other in self.story.uses():
            if not use.stream.knows(other.stream, other.moment):
                did = "writes" if other is self.story.written else "reads"
                _race(f"{use.stream} overwrites at {use.place} what {other.stream} {did} at {other.place}")
        self.story.written, self.story.reads = use, {}

    def host_reads(self) -> None:
        self._host("reads", [self.story.written] if self.story.written else [])

    def host_writes(self) -> None:
        self._host("overwrites", [*self.story.uses()])
        self.story.written, self.story.reads = None, {}

    def _host(self, does: str, uses: list[Use]) -> None:
        """The host goes on while the device works: it must have waited for what it touches."""
        for use in uses:
            if use.moment > finished.get(use.stream, 0):
                thread = threading.current_thread().name
                _race(f"the host ({thread}) {does} at {place()} what {use.stream} may still use ({use.place})")


def _race(text: str) -> None:
    diary.races[text] += 1


def _freed(story: Story) -> None:
    with lock:
        diary.live -= story.length
        assert story.home is not None
        for use in story.uses():
            told = use.stream in story.recorded or story.home.knows(use.stream, use.moment)
            if not told and story.length >= SMALL:
                diary.lifetimes[
                    f"allocated on {story.home} at {story.born}, freed while {use.stream} may use it at {use.place}"
                ] += 1


_memories: "weakref.WeakValueDictionary[int, Memory]" = weakref.WeakValueDictionary()


def memory_of(inner: Tensor, home: Stream | None) -> Memory:
    """The memory under a plain tensor; views share theirs."""
    storage = inner.untyped_storage()
    with lock:
        found = _memories.get(storage._cdata)
        if found is None:
            found = _memories[storage._cdata] = Memory(storage.nbytes(), home)
        return found
