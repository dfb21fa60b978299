"""Compile the kernels of a check side by side, before they are checked one after the other.

Triton compiles a program for each kind of arguments, a second or so of one core, and keeps it in its cache on disk.
Run as `gossamer.bench.compare.gpu.compile_ahead SPEC`; a kernel that fails here fails in the check, which says so.
"""

import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace

import torch

from gossamer.bench.compare.gpu import kernels, samples
from gossamer.bench.compare.gpu.check_spec import CheckSpec
from gossamer.bench.compare.parent_death import PARENT, program

MODULE = "gossamer.bench.compare.gpu.compile_ahead"
MOST = 8  # processes on a GPU, each of which holds some hundred MB of its memory


def compile_ahead(spec: CheckSpec, cores: int) -> None:
    """Start processes that try a share of the kernels each, and wait for them, at most as long as the check may take."""
    count = min(cores, MOST, len(spec.subjects))
    if count < 2:
        return
    until = time.monotonic() + spec.sizes.limit * len(spec.subjects) / count
    shares = (replace(spec, subjects=spec.subjects[i::count]) for i in range(count))
    running = [_started(share) for share in shares]
    try:
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(until - time.monotonic(), 0))
    finally:
        for process in running:
            process.kill()
            process.wait()


def _started(share: CheckSpec) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        program(MODULE, share.to_json()),
        env=os.environ | {PARENT: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def cores_of(spec: CheckSpec) -> int:
    """The cores of this machine for each of its ranks that take part."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return (os.cpu_count() or 1) // max(min(here, len(spec.ranks)), 1)


def main(text: str) -> None:
    spec = CheckSpec.of_json(text)
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    for subject in spec.subjects:
        with suppress(Exception):
            for n in spec.sizes.lengths:
                for args, shift in samples.calls(subject, n):
                    kernels.called(subject, args, device, shift)


if __name__ == "__main__":
    main(sys.argv[1])
