"""How busy ranks keep the processor: whether an emulated accelerator leaves it to the comm threads."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gossamer.bench.record import Run
from gossamer.bench.workloads.computing import ComputeTime

MOST = 0.5  # of the cores for as long as computing lasts; above it, ranks wait for cores and not for the network


class LoadMeter:
    """Measures the processor over slices of training: this process with all its threads, and the whole machine.

    The first slice compiles kernels and lets DDP regroup its buckets, so it counts only as long as there is no other.
    """

    def __init__(self) -> None:
        self.slices = 0
        self.totals = dict.fromkeys(("steps", "seconds", "rank", "machine"), 0.0)
        self.before = dict[str, float]()

    def begin(self, step: int) -> None:
        self.before = self._now(step)

    def end(self, step: int) -> None:
        self.slices += 1
        now = self._now(step)
        for what, total in self.totals.items():
            self.totals[what] = (total if self.slices != 2 else 0.0) + now[what] - self.before[what]

    def means(self) -> dict[str, float]:
        """Seconds of a processor per step of this rank, and busy cores of its machine; without what is not known."""
        totals, found = self.totals, dict[str, float]()
        if totals["steps"]:
            found["processor"] = totals["rank"] / totals["steps"]
        if totals["machine"] and totals["seconds"]:
            found["busy_cores"] = totals["machine"] / totals["seconds"]
        return found

    def _now(self, step: int) -> dict[str, float]:
        return {"steps": step, "seconds": time.perf_counter(), "rank": time.process_time(), "machine": _machine()}


def _machine() -> float:
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

    >>> describe([Run("ddp", "ddp")], 4, "300ms")
    'computing was emulated (300ms), so losses mean nothing'
    """
    told = f"computing was emulated ({compute}), so losses mean nothing"
    used = {run.name: 1000 * run.processor for run in runs if run.processor is not None}
    if not used:
        return told
    highest = max(used, key=lambda name: used[name])
    lasts = 1000 * ComputeTime.of(compute).mean
    share = ranks * used[highest] / (cores() * lasts)
    told += (
        f"; a rank used {min(used.values()):.0f} to {used[highest]:.0f} ms of a processor a step, most under {highest}: "
        f"{share:.0%} of {cores()} cores for as long as computing lasts, with {ranks} ranks"
    )
    busy = [run.busy_cores for run in runs if run.busy_cores is not None]
    if busy:
        told += f"; {min(busy):.1f} to {max(busy):.1f} cores were busy, other programs included"
    if share > MOST:
        needed = round(lasts * share / MOST, -1) + 10
        told += (
            f". That is more than {MOST:.0%}: ranks wait for cores, and steps say little about an accelerator. "
            f"Give --compute {needed:.0f}ms or more, or fewer hosts"
        )
    return told
