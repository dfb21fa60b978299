"""Run events: what a process says of itself in a file of its own, so that `gossamer goodput` can tell what a run cost.

The training loop only sets a few numbers, or queues a few words. A thread writes them once a second with one call, so that a
process that is killed loses at most the last second. It is a thread of its own: that of the heartbeat waits for a store now and
then, and there is none in a world of one.
"""

import hashlib
import json
import math
import os
import socket
import sys
import threading
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, final

from gossamer.core.errors import AttachError
from gossamer.core.version import __version__
from gossamer.costs.run_files import FORM, ProcessEvents, StepCount, take
from gossamer.costs.spent import Spent, spent_by, stretches, typical
from gossamer.fabrics.liveness.notice import Notice, OwnNotice
from gossamer.fabrics.torch.fabric import TorchFabric
from gossamer.runtime import ReplicaRanks, Worker

OFTEN = 1.0  # seconds between two writes
LONG = 1.0  # seconds after which a wait is told while it goes on
RARELY = 15  # writes between two sums for metrics
MANY = 500  # counts that are kept for those sums; older ones are thinned out
_LOADED = time.monotonic()
_open = set[Path]()  # folders that communicators of this process write to
_begun = 0  # id of the process that has written events before; a forked one has another


def seconds_alive() -> float:
    """Seconds since this process was started; where the system does not say, since gossamer was loaded."""
    alive = _seconds_alive("self")
    return time.monotonic() - _LOADED if alive is None else alive


def _seconds_launching(alive: float) -> float:
    """Seconds from the start of torchrun, which has started this process, to the start of this process; 0 without it."""
    launcher = _seconds_alive(str(os.getppid())) if "TORCHELASTIC_RUN_ID" in os.environ else None
    return 0.0 if launcher is None else max(0.0, launcher - alive)


def _seconds_alive(process: str) -> float | None:
    try:
        started = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def _boot() -> tuple[str, float]:
    """Which start of this machine it is, and the seconds since then; "" where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError):
        return "", 0.0


def _began(rank: int, size: int, now: float) -> dict[str, Any]:
    """The first line of a process; `now` is the time since it began."""
    boot, since_boot = _boot()
    return {
        "event": "began",
        "at": 0.0,
        "form": FORM,
        "rank": rank,
        "size": size,
        "process": uuid.uuid4().hex[:12],
        "machine": socket.gethostname(),
        "boot": boot,
        "born": round(max(0.0, since_boot - now), 3),
        "launching": round(_seconds_launching(now), 3),
        "wall": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "gossamer": __version__,
    }


@final
class RunEvents:
    """Writes the events of one process, from `attach` to `detach`, into a new file of a folder."""

    def __init__(self, folder: str | os.PathLike[str], rank: int, size: int, fabric: TorchFabric) -> None:
        self.folder = Path(folder)
        self._fabric = fabric
        if self.folder.resolve() in _open:
            raise AttachError(
                f"events={str(folder)!r} is written to by another communicator of this process: give each a folder of its own"
            )
        self._file, path = _new_file(self.folder, rank)
        _open.add(self.folder.resolve())
        # The first communicator of a process counts from the process's start; a later one from now, or time would count twice.
        global _begun
        self._zero = time.monotonic() - (0.0 if _begun == os.getpid() else seconds_alive())
        _begun = os.getpid()
        self._apart = time.monotonic() - time.perf_counter()  # two clocks, which begin at other times on some systems
        self._kept = ProcessEvents(path, rank, 0)  # what was written, for metrics
        self._queue = deque[tuple[str, float, Callable[[], dict[str, Any]]]]()
        self._first: StepCount | None = None  # this and the next on the clock of `time.monotonic`
        self._last: StepCount | None = None
        self._written = 0  # steps that were written
        self._writes = 0
        self.notice: Notice | OwnNotice | None = None  # under `leaving_at`
        self._told = False
        self.spent = Spent()  # where the time of this process went, as of a few seconds ago
        self._write([_began(rank, size, self._now())])
        self._over = threading.Event()
        self._lock = threading.Lock()  # of the file: `close` writes too
        self._thread = threading.Thread(target=self._live, name="gossamer-events", daemon=True)
        self._thread.start()
        # After all that waits for other ranks at the end of a process, which takes time as well.
        self._at_exit = Finalize(None, self.close, exitpriority=-1)

    # -- on the training thread ----------------------------------------------------------------------------------------

    def stepped(self, step: int) -> None:
        """Note the end of an optimizer step. Several optimizers may end one."""
        last = self._last
        if last is not None and last.step == step:
            return
        done = 1 if last is None else last.done + 1
        self._last = StepCount(time.monotonic(), step, done, self._fabric.ledger.exposed_seconds)
        if last is None:
            self._first = self._last

    def attached(self, worker: Worker) -> None:
        """Note what is trained, by which recipe, and from which step on."""
        schedule = worker.recipe.schedule
        layout = [[name, str(param.dtype), list(param.whole_shape)] for name, param in worker.params.items()]
        self.put(
            "attached",
            recipe=repr(worker.recipe),
            period=schedule.shape.period,
            round=1 if schedule.shape.averages_gradients else schedule.shape.period,
            step=worker.step - 1,
            model=hashlib.sha256(json.dumps(layout).encode()).hexdigest()[:16],
        )

    def put(self, event: str, **facts: Any) -> None:
        """Note anything else that happens now."""
        self.put_later(event, lambda: facts)

    def put_later(self, event: str, facts: Callable[[], dict[str, Any]]) -> None:
        """Note something of which the facts are asked for by the thread that writes, as it may have to wait for a device."""
        self._queue.append((event, time.monotonic(), facts))

    def presence(self, step: int, lost: Sequence[int], back: Sequence[int], left: Sequence[int]) -> None:
        """Note ranks that were lost, have come back, or have left in good order, as of this step."""
        for event, ranks in (("lost", lost), ("back", back), ("left", left)):
            if ranks:
                self.put(event, step=step, ranks=[*ranks])

    def metrics(self) -> dict[str, float]:
        """The share of this process's time that became steps, and where the rest went, as of a few seconds ago."""
        spent = self.spent
        return {"goodput": spent.share} | {
            f"{cause}_seconds": getattr(spent, cause) for cause in ("starting", "waiting", "saving", "standing")
        }

    def close(self) -> None:
        """Write how this communicator ended, and close the file. A failure is one that is being handled, or has ended the program."""
        if self._over.is_set():
            return
        self._over.set()
        self._at_exit.cancel()
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        self.put("ended", how="in order" if error is None else f"failed: {type(error).__name__}")
        self._thread.join(OFTEN)
        self._tick()
        with self._lock:
            _open.discard(self.folder.resolve())
            if self._file >= 0:
                os.close(self._file)
            self._file = -1

    # -- in the thread that writes -------------------------------------------------------------------------------------

    def _live(self) -> None:
        while not self._over.wait(OFTEN):
            self._tick()

    def _tick(self) -> None:
        with self._lock:
            lines = self._lines()
            if self._file < 0:
                return
            if not lines and not self._over.is_set():  # nothing stands behind how it ended
                lines = [{"event": "alive", "at": self._now()}]
            self._write(lines)
            self._writes += 1
            if self._writes % RARELY == 1:
                self._sum_up()

    def _lines(self) -> list[dict[str, Any]]:
        lines, last = list[dict[str, Any]](), self._last
        while self._queue:
            event, at, facts = self._queue.popleft()
            lines.append({"event": event, "at": self._at(at), **facts()})
        if last is not None and last.done > self._written:
            if not self._written and self._first is not None:
                lines.append(self._count("first step", self._first))
            if last.done > 1:
                lines.append(self._count("steps", last))
            self._written = last.done
        since = self._fabric.standstill.since
        if since is not None and time.perf_counter() - since >= LONG:
            lines.append({"event": "waits", "at": self._now(), "since": self._at(since + self._apart)})
        notice = self.notice
        if notice is not None and not self._told and (notice.received or notice.stops_after is not None):
            self._told = True
            lines.append({"event": "told to stop", "at": self._now(), "signal": notice.received})
        return sorted(lines, key=lambda line: line["at"])

    def _count(self, event: str, count: StepCount) -> dict[str, Any]:
        return {"event": event, **count._asdict(), "at": self._at(count.at), "waited": round(count.waited, 4)}

    def _write(self, lines: list[dict[str, Any]]) -> None:
        """Append lines in one call, so that none is cut where the process is killed."""
        try:
            os.write(self._file, "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode())
        except OSError as error:
            os.close(self._file)
            self._file = -1
            warnings.warn(
                f"events of this process are no longer written to {self._kept.path}: {error.strerror}. Training goes on, and goodput "
                "will count this process up to now only",
                RuntimeWarning,
                stacklevel=2,
            )
        for line in lines:
            take(self._kept, line)

    def _sum_up(self) -> None:
        """Sum up for metrics; in steps of before a long time it need not look closely."""
        kept = self._kept
        kept.end = max(kept.end, self._now())
        if len(kept.counts) > MANY:
            del kept.counts[1:-1:2]
        last = kept.counts[-1].at if kept.counts else 0.0
        kept.waits = [wait for wait in kept.waits if wait.at > last]
        cut = stretches(kept)
        self.spent = spent_by(kept, cut, typical(cut, kept.period))

    def _now(self) -> float:
        return self._at(time.monotonic())

    def _at(self, time: float) -> float:
        return round(max(0.0, time - self._zero), 6)  # so that no two events share a time


def _new_file(folder: Path, rank: int) -> tuple[int, Path]:
    """Open a file that is not there yet; its number says how often this rank has been started."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = [int(n) for p in folder.glob(f"rank{rank}.*.jsonl") if (n := p.name.split(".")[1]).isdecimal()]
        path = folder / f"rank{rank}.{max(taken, default=0) + 1}.{uuid.uuid4().hex[:4]}.jsonl"
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o666), path
    except OSError as error:
        raise AttachError(
            f"events={str(folder)!r}: {error.filename or folder} cannot be written: {error.strerror}; give a folder that this rank may write to"
        ) from None


def recorded(
    folder: str | os.PathLike[str] | None, fabric: TorchFabric, replica: ReplicaRanks | None = None
) -> tuple[RunEvents | None, AttachError | None]:
    """Open this process's file, if a folder is named; a refusal is returned, so that the caller can tell all ranks."""
    if folder is None:
        return None, None
    shards, shard = (1, 0) if replica is None else (replica.size, replica.index)
    if fabric.members is not None:  # they number each rank
        shards, shard = 1, 0
    try:
        return RunEvents(folder, fabric.rank * shards + shard, fabric.size * shards, fabric), None
    except AttachError as refusal:
        return None, refusal


def held_out_line(step: int, value: Any) -> dict[str, Any]:
    """A held-out value as a line has it; one that is not finite is null."""
    number = float(value)
    return {"step": step, "value": number if math.isfinite(number) else None}
