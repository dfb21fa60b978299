"""The link between ranks: latency and rate, from all-reduces of two sizes."""

import json
import os
import statistics
import subprocess
import sys
from datetime import timedelta
from time import perf_counter

import torch
import torch.distributed as dist

from gossamer.core.errors import PeerError

SMALL, LARGE = 256, 2 * 2**20  # float32 elements


def alpha_beta() -> tuple[float, float]:
    """Seconds per hop and bytes per second, of a ring all-reduce over all ranks that a launcher started."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    size = dist.get_world_size()
    small, large = _seconds(SMALL), _seconds(LARGE)
    dist.destroy_process_group()
    if size == 1:
        return 0.0, float("inf")
    hops, crossed = 2 * (size - 1), 2 * (size - 1) / size * 4 * LARGE
    return small / hops, crossed / max(large - small, 1e-9)


def _seconds(elements: int) -> float:
    times, x = list[float](), torch.zeros(elements)
    for _ in range(8):
        dist.barrier()
        began = perf_counter()
        dist.all_reduce(x)
        times.append(perf_counter() - began)
    return statistics.median(times)


def between_two_ranks() -> tuple[float, float]:
    """The same, over loopback, when no launcher has started us."""
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", __name__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        raise PeerError("two ranks on this machine did not find each other within two minutes") from None
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found = json.loads(line)
            return found["latency"], found["rate"]
    raise PeerError(f"two ranks on this machine could not talk to each other:\n{done.stderr[-2000:].strip()}")


if __name__ == "__main__":
    latency, rate = alpha_beta()
    if os.environ.get("RANK") == "0":
        print(json.dumps({"latency": latency, "rate": rate}), flush=True)
