"""What happened on the pretended device, counted by the line of gossamer that did it."""

import sys
import threading
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

import gossamer

SOURCE = str(Path(gossamer.__file__).parent) + "/"
ELSEWHERE = "elsewhere"  # the user's model and optimizer, and torch's own code for them

lock = threading.RLock()  # programs run on several threads; the device is one


@dataclass
class Diary:
    """Everything that the judges look at."""

    syncs: Counter[str] = field(default_factory=Counter[str])  # the host waited for the device, on the caller's thread
    lane_syncs: Counter[str] = field(default_factory=Counter[str])  # the same, on a lane's thread
    launches: Counter[str] = field(default_factory=Counter[str])
    races: Counter[str] = field(default_factory=Counter[str])
    lifetimes: Counter[str] = field(default_factory=Counter[str])
    strays: Counter[str] = field(default_factory=Counter[str])  # a lane worked on a stream that is not its own
    crossings: int = 0  # operations that were given to a process group
    live: int = 0  # bytes on the device
    peak: int = 0
    warns: bool = False

    def clear(self) -> None:
        for counter in (self.syncs, self.lane_syncs, self.launches, self.races, self.lifetimes):
            counter.clear()

    def waits(self, what: str) -> None:
        """The host waits for the device. Torch warns of it where it is asked to, but not of waits for an event."""
        if self.warns and what != "Event.synchronize":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        in_lane = threading.current_thread().name.startswith("gossamer-")
        with lock:
            (self.lane_syncs if in_lane else self.syncs)[f"{what} @ {place(3)}"] += 1

    def set_debug_mode(self, mode: str) -> None:
        self.warns = mode == "warn"

    def works_on(self, default: bool) -> None:
        """What a lane's thread puts on a device's default stream waits behind what the loop computes, and the loop behind it."""
        if default and threading.current_thread().name.startswith("gossamer-"):
            with lock:
                self.strays[place(2)] += 1

    def grows(self, length: int) -> None:
        with lock:
            self.live += length
            self.peak = max(self.peak, self.live)


diary = Diary()
_labels = dict[CodeType, str | None]()
_TRAINS = str(Path(__file__).parent / "loops.py")  # outside of which nobody calls gossamer


def place(depth: int = 1) -> str:
    """The innermost lines of gossamer that led here."""
    out, frame = list[str](), sys._getframe(1)
    while frame is not None and len(out) < depth:
        code = frame.f_code
        file = _labels[code] if code in _labels else _label(code)
        if file is not None:
            if not file:
                break
            out.append(f"{file}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " < ".join(out) or ELSEWHERE


def _label(code: CodeType) -> str | None:
    """The file, if it is gossamer's; nothing if it is the training loop."""
    name = code.co_filename
    _labels[code] = name.removeprefix(SOURCE) if name.startswith(SOURCE) else "" if name == _TRAINS else None
    return _labels[code]
