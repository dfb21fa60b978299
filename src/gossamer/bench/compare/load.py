"""How busy ranks keep the processor: whether an emulated accelerator leaves it to the comm threads."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path

from gossamer.bench.record import Run
from gossamer.bench.workloads import Workload
from gossamer.bench.workloads.computing import ComputeTime
from gossamer.bench.workloads.emulated import EmulatedWorkload

MOST = 0.5  # of the cores for as long as computing lasts; above it, ranks wait for cores and not for the network
LATE = 0.05  # of computing; above it, steps are longer than what was asked for
MACHINE = "machine"


class LoadMeter:
    """Measures the processor over slices of training: this process with all its threads, and the whole machine.

    The first slice compiles kernels and lets DDP regroup its buckets, so it counts only as long as there is no other.
    """

    def __init__(self, workload: Workload) -> None:
        self.passes = workload.totals if isinstance(workload, EmulatedWorkload) else None
        self.slices, self.steps, self.seconds = 0, 0, 0.0
        self.totals = dict[str, float]()
        self.before = dict[str, float](), 0.0

    def begin(self) -> None:
        self.before = self._now(), time.perf_counter()

    def end(self, steps: int) -> None:
        """The slice had so many steps."""
        (before, began), now = self.before, self._now()
        self.slices += 1
        if self.slices <= 2:
            self.steps, self.seconds, self.totals = 0, 0.0, dict.fromkeys(now, 0.0)
        self.steps, self.seconds = self.steps + steps, self.seconds + time.perf_counter() - began
        self.totals = {what: total + now[what] - before[what] for what, total in self.totals.items()}

    def means(self) -> dict[str, float]:
        """Seconds per step, and how many cores of the machine were busy; without what is not known."""
        found = {what: total / self.steps for what, total in self.totals.items() if self.steps and what != MACHINE}
        busy = self.totals.get(MACHINE)
        return {**found, "busy_cores": busy / self.seconds} if busy and self.seconds else found

    def _now(self) -> dict[str, float]:
        now = {"processor": time.process_time(), MACHINE: busy_seconds()}
        return now if self.passes is None else {**now, "beside": self.passes.used, "late": self.passes.late}


def busy_seconds() -> float:
    """Seconds that all cores were busy since the machine started, the kernel's and others' work included; 0 if unknown."""
    with suppress(OSError, ValueError, IndexError):
        user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
        return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    return 0.0


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe(runs: Sequence[Run], ranks: int, compute: str) -> str:
    """What the ranks of an emulation used of the processor, and a warning where that is too much.

    >>> describe([Run("ddp", "ddp", processor=0.045, beside=0.03, late=0.0004)], 4, "300ms").partition("; ")[2]
    'a rank used 45 ms of a processor a step, 30 ms of it while computing lasted, which ended 0.4 ms late'
    """
    told = f"computing was emulated ({compute}), so losses mean nothing"
    beside = {run.name: run.beside for run in runs if run.beside is not None}
    if not beside:
        return told
    used = [run.processor for run in runs if run.processor is not None]
    late = [run.late for run in runs if run.late is not None]
    told += (
        f"; a rank used {_span(used, 0)} ms of a processor a step, {_span([*beside.values()], 0)} ms of it while computing "
        f"lasted, which ended {_span(late, 1)} ms late"
    )
    busy = [run.busy_cores for run in runs if run.busy_cores is not None]
    if busy:
        told += f"; {_span([each / 1000 for each in busy], 1)} of {cores()} cores were busy, other programs included"
    return told + _warning(beside, max(late), ranks, ComputeTime.of(compute).mean)


def _warning(beside: Mapping[str, float], late: float, ranks: int, lasts: float) -> str:
    """Say whose comm threads want too much of the cores for as long as computing lasts, or that others keep them busy."""
    most = max(beside, key=lambda name: beside[name])
    share = ranks * beside[most] / (cores() * lasts)
    if share > MOST:
        longer = 10 * ceil(100 * lasts * share / MOST)
        return (
            f". Under {most}, {ranks} ranks wanted {share:.0%} of {cores()} cores for as long as computing lasts, and more "
            f"than {MOST:.0%} means that they wait for cores: give --compute {longer}ms or more, or fewer hosts"
        )
    if late > LATE * lasts:
        return f". More than {LATE:.0%} late: other programs keep the cores busy, so run it again on a quieter machine"
    return ""


def _span(seconds: Sequence[float], digits: int) -> str:
    """Milliseconds, from the least to the most.

    >>> _span([0.018, 0.045], 0), _span([0.018, 0.0184], 0)
    ('18 to 45', '18')
    """
    texts = [f"{1000 * each:.{digits}f}" for each in (min(seconds), max(seconds))]
    return " to ".join(dict.fromkeys(texts))
