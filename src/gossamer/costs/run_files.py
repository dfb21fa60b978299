"""Run files: the events that processes of a run wrote, one file for each start of a process; read and checked.

A line is a JSON object with an `event` and a time `at`, in seconds since that process was started, by its own clock. Counts in
lines of `steps` are totals, so that a line less loses nothing. `integrations/run_events.py` writes them.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from gossamer.core.errors import CostError
from gossamer.core.text import shown

NAMES = "rank*.jsonl"
FORM = 1  # of the lines; a later one is refused
MOST = 4 * 2**30  # bytes of a file
TOGETHER = 2.0  # seconds that two processes of a rank on one machine may overlap: one ends while the next begins
_NAME = re.compile(r"rank(\d+)\.(\d+)\.[0-9a-z]+\.jsonl")
TRAINED = "Record a run with attach(..., events=FOLDER), and give that folder"


class StepCount(NamedTuple):
    """What a process has done by the end of one of its steps."""

    at: float
    step: int  # the number of that step
    done: int  # steps of this process so far
    waited: float  # seconds so far in which its loop stood still for the network or for others


class Save(NamedTuple):
    """A checkpoint that has just been saved, and how long the training loop stood still for it."""

    at: float
    seconds: float


class Quality(NamedTuple):
    """A held-out value that the training loop logged."""

    step: int
    value: float


class LongWait(NamedTuple):
    """A wait that was still under way."""

    at: float
    since: float


class StepOrigin(NamedTuple):
    """Steps are counted from here: the model was attached, or a checkpoint was loaded."""

    at: float
    step: int


@dataclass
class ProcessEvents:
    """All that one process said of itself, from its start to its last line."""

    path: Path
    rank: int
    number: int  # of this start, among those of its rank
    process: str = ""
    machine: str = ""
    boot: str = ""
    born: float = 0.0  # seconds from the machine's start to the process's
    launching: float = 0.0  # seconds before that in which its launcher was there: torchrun waits for all machines
    size: int = 1
    recipe: str = ""
    model: str = ""  # a hash of the parameters' names and shapes
    period: int = 1  # steps after which the recipe's requests repeat
    round: int = 1  # steps from one average to the next: what a process that dies may take with it
    counts: list[StepCount] = field(default_factory=list[StepCount])  # the first is that of the first step
    starts: list[StepOrigin] = field(default_factory=list[StepOrigin])
    saves: list[Save] = field(default_factory=list[Save])
    qualities: list[Quality] = field(default_factory=list[Quality])
    lost: list[int] = field(default_factory=list[int])  # ranks that it heard to be lost, and not to be back
    waits: list[LongWait] = field(default_factory=list[LongWait])
    told: float | None = None  # to stop
    ended: str | None = None  # how; None: killed, or still at work
    end: float = 0.0  # the time of its last line
    cut: bool = False  # its last line is not whole

    @property
    def begins(self) -> list[StepOrigin]:
        """Where it counted steps from; not the step 0 that it was attached at before a checkpoint was loaded."""
        until = [*(start.at for start in self.starts[1:]), math.inf]
        return [s for s, end in zip(self.starts, until) if any(s.at <= count.at < end for count in self.counts)]

    @property
    def first(self) -> int:
        """The step that it began after."""
        begins = self.begins or self.starts[-1:]
        return begins[0].step if begins else 0

    @property
    def last(self) -> int:
        """The step that it got to."""
        return self.counts[-1].step if self.counts else self.starts[-1].step if self.starts else 0

    def before(self, later: "ProcessEvents") -> float | None:
        """Seconds from its end to the start of a later process on the same machine; None on another one."""
        if not self.boot or (self.machine, self.boot) != (later.machine, later.boot):
            return None
        return later.born - (self.born + self.end)


def read_folder(folder: Path) -> dict[int, list[ProcessEvents]]:
    """The processes of each rank, in the order in which they were started. Raises CostError for what is no record of one run."""
    try:
        paths = sorted(folder.rglob(NAMES)) if folder.is_dir() else []
    except OSError as error:
        raise CostError(f"{folder} cannot be read: {error.strerror}") from None
    if not folder.exists():
        raise CostError(f"there is no folder {folder}. {TRAINED}")
    if not folder.is_dir():
        raise CostError(f"{folder} is not a folder. {TRAINED}")
    if not paths:
        raise CostError(f"{folder} holds no events of a run (files such as rank0.1.3f2a.jsonl). {TRAINED}")
    by_rank = dict[int, list[ProcessEvents]]()
    for path in paths:
        read = read_file(path)
        by_rank.setdefault(read.rank, []).append(read)
    for processes in by_rank.values():
        processes.sort(key=lambda p: (p.number, p.first, p.born))
        _refuse_overlaps(processes)
    _refuse_two_runs(folder, by_rank)
    return dict(sorted(by_rank.items()))


def _refuse_overlaps(processes: list[ProcessEvents]) -> None:
    for i, earlier in enumerate(processes):
        for later in processes[i + 1 :]:
            if earlier.process == later.process or _overlap(earlier, later) > TOGETHER:
                raise CostError(
                    f"{earlier.path} and {later.path.name} overlap: rank {earlier.rank} was in two processes at once, or a file was copied. "
                    "Give each run a folder of its own, and move the file that does not belong to this run"
                )


def _overlap(one: ProcessEvents, other: ProcessEvents) -> float:
    """Seconds in which both were there; what is on different machines cannot be compared, since their clocks differ."""
    gaps = one.before(other), other.before(one)
    return 0.0 if gaps[0] is None or gaps[1] is None else -max(gaps[0], gaps[1])


def _refuse_two_runs(folder: Path, by_rank: Mapping[int, list[ProcessEvents]]) -> None:
    """Processes of one run train one model, and who ended in order is not followed by one who begins anew."""
    known = dict[str, ProcessEvents]()
    for processes in by_rank.values():
        for p in processes:
            if p.model:
                known.setdefault(p.model, p)
        for earlier, later in pairwise(processes):
            in_order = earlier.ended == "in order" and earlier.told is None
            if in_order and later.begins and not later.first and earlier.last:
                raise CostError(
                    f"{folder} holds two runs: {earlier.path.name} ended in order at step {earlier.last}, and {later.path.name} began anew. "
                    "Move the files of one of them to another folder"
                )
    if len(known) > 1:
        one, other = list(known.values())[:2]
        raise CostError(
            f"{folder} holds two runs: {one.path.name} and {other.path.name} trained other models. Move the files of one of them to "
            "another folder"
        )


def read_file(path: Path) -> ProcessEvents:
    """What one process wrote; a last line that was cut off is left out, and noted."""
    found = _NAME.fullmatch(path.name)
    if found is None:
        raise CostError(f"{path} is not named as events of a run are (rank0.1.3f2a.jsonl): move it to another folder")
    process = ProcessEvents(path, int(found[1]), int(found[2]))
    for number, line in _lines(process):
        try:
            take(process, line)
        except (ValueError, TypeError, KeyError) as error:
            why = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise CostError(
                f"{path}, line {number} is not what gossamer writes ({why}): {shown(line)}. Take the line out, or the file"
            ) from None
    if not process.process:
        raise CostError(
            f"{path} ends before its first line does, so nothing is known of its process: move it to another folder"
        )
    process.counts.sort()
    return process


def _lines(process: ProcessEvents) -> Iterator[tuple[int, dict[str, Any]]]:
    path = process.path
    try:
        if (size := path.stat().st_size) > MOST:
            raise CostError(f"{path} has {size / 2**30:.1f} GiB, and events of one process at most {MOST / 2**30:.0f}")
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    process.cut = True
                    return
                yield number, _object(path, number, line)
    except OSError as error:
        raise CostError(f"{path} cannot be read: {error.strerror}") from None


def _object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        read: Any = json.loads(line)
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        text = line.decode("utf-8", "replace").strip()
        raise CostError(
            f"{path}, line {number} is not what gossamer writes: {shown(text)}. Take the line out, or the file"
        )
    return read  # pyright: ignore[reportUnknownVariableType]


def take(process: ProcessEvents, line: Mapping[str, Any]) -> None:
    """Add one event; raises ValueError, TypeError or KeyError for one that is damaged."""
    event, at = line["event"], _number(line, "at")
    if event != "began" and not process.process:
        raise ValueError("the first line of a process says how it began")
    process.end = max(process.end, at)
    match event:
        case "began":
            _began(process, line)
        case "attached":
            process.recipe, process.model = str(line["recipe"]), str(line["model"])
            process.period, process.round = max(1, _whole(line, "period")), max(1, _whole(line, "round"))
            process.starts.append(StepOrigin(at, _whole(line, "step")))
        case "loaded":
            process.starts.append(StepOrigin(at, _whole(line, "step")))
        case "first step" | "steps":
            process.counts.append(StepCount(at, _whole(line, "step"), _whole(line, "done"), _number(line, "waited")))
        case "saved":
            process.saves.append(Save(at, _number(line, "seconds")))
        case "held out":
            value = line["value"]  # null where it is not a finite number
            process.qualities.append(Quality(_whole(line, "step"), math.nan if value is None else float(value)))
        case "waits":
            process.waits.append(LongWait(at, _number(line, "since")))
        case "lost":
            process.lost = [*process.lost, *map(int, line["ranks"])]
        case "back":
            back = {int(rank) for rank in line["ranks"]}
            process.lost = [rank for rank in process.lost if rank not in back]
        case "told to stop":
            process.told = at
        case "ended":
            process.ended = str(line["how"])
        case _:
            pass  # `alive`, and what later versions say


def _began(process: ProcessEvents, line: Mapping[str, Any]) -> None:
    if process.process:
        raise ValueError("a process begins once")
    if (form := _whole(line, "form")) > FORM:
        raise ValueError(f"it has form {form}, and this gossamer reads up to {FORM}: use the version that wrote it")
    if _whole(line, "rank") != process.rank:
        raise ValueError(f"it is of rank {line['rank']}, and its name says {process.rank}")
    process.process, process.machine, process.boot = str(line["process"]), str(line["machine"]), str(line["boot"])
    process.born, process.size = _number(line, "born"), _whole(line, "size")
    process.launching = _number(line, "launching")


def _number(line: Mapping[str, Any], name: str) -> float:
    value = line[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be a number of at least 0")
    return float(value)


def _whole(line: Mapping[str, Any], name: str) -> int:
    value = _number(line, name)
    if value != int(value):
        raise ValueError(f"{name} must be a whole number")
    return int(value)
