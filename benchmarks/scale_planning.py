"""How much planning for many ranks costs: ratios of processor time in one run, and a peak of memory.

python benchmarks/scale_planning.py

The line-up is planned for `gpt2` (124 M parameters) on 8, 1,024 and 10,000 hosts, twice, and the faster run counts: its rehearsal,
its pieces and the replay at one rate. Then on ten numbers of hosts at 25 rates each. Work is counted as passes over memory, which
takes no time, as if it had been measured. `llama-7b` is planned last, in a process of its own, whose peak of memory is printed.
"""

import argparse
import resource
import subprocess
import sys
import time

import torch

from gossamer.costs import from_flags
from gossamer.planning.model_cost import ModelCost
from gossamer.planning.model_shapes import known_model
from gossamer.planning.plan import LINE_UP, Prepared, plan, prepare
from gossamer.planning.rates import RATES
from gossamer.planning.work import MemoryPasses

HOSTS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
RATE = 125e6  # bytes per second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", action="store_true", help="plan llama-7b only; set by the program itself")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.llama:
        llama()
        return
    model = known_model("gpt2", 0.35)
    line_up(model, 16)  # kernels and tables that a process makes once
    seconds = {hosts: min(line_up(model, hosts) for _ in range(2)) for hosts in (8, 1024, 10_000)}
    print(", ".join(f"{hosts} hosts: {spent:.2f} s" for hosts, spent in seconds.items()))
    bar("1,024 hosts over 8", seconds[1024] / seconds[8], 1.5)
    bar("10,000 hosts over 1,024", seconds[10_000] / seconds[1024], 1.2)
    bar("ten numbers of hosts at 25 rates, seconds", grid(model), 60)
    done = subprocess.run(
        [sys.executable, __file__, "--llama"], capture_output=True, text=True, check=True, timeout=500
    )
    bar("llama-7b, GB", float(done.stdout), 2)


def line_up(model: ModelCost, hosts: int) -> float:
    """Processor seconds to plan the line-up at one rate."""
    cluster, began = from_flags(nodes=hosts, rate=RATE), time.process_time()
    for prepared in prepared_for(model, hosts):
        prepared.seconds(cluster)
    return time.process_time() - began


def prepared_for(model: ModelCost, hosts: int) -> list[Prepared]:
    cluster = from_flags(nodes=hosts, rate=RATE)
    names = [name for name in LINE_UP if hosts > 2 or name != "backup"]  # it needs a rank to leave out
    return [prepare(name, model, cluster, MemoryPasses(cluster.memory_rate)) for name in names]


def grid(model: ModelCost) -> float:
    """Processor seconds to plan the line-up on ten numbers of hosts, at 25 rates each."""
    began = time.process_time()
    for hosts in HOSTS:
        cluster = from_flags(nodes=hosts, rate=RATE)
        for prepared in prepared_for(model, hosts):
            for rate in RATES:
                prepared.seconds(cluster.at_rate(rate))
    return time.process_time() - began


def llama() -> None:
    """Plan the line-up for llama-7b on 4 hosts of 8 GPUs, and print this process's peak of memory in GB."""
    cluster = from_flags(nodes=4, gpus=8, rate=25e9 / 8)
    found = plan(known_model("llama-7b", 2.0), cluster, shards=8, curves=False)
    assert all(row.error == "" for row in found.recipes), [row.error for row in found.recipes]
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)


def bar(what: str, found: float, most: float) -> None:
    print(f"  {what}: {found:.2f} ({most:g}): {'met' if found <= most else 'not met'}", flush=True)


if __name__ == "__main__":
    main()
