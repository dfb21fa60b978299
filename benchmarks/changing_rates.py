"""Does `auto` follow a network whose rate changes, in a lab? And does it stay where only a rank is slow?

    python benchmarks/changing_rates.py falls       1gbit, 50mbit from about step 300 on, and 1gbit again
    python benchmarks/changing_rates.py flickers    1gbit and 50mbit, in turns of some 50 steps
    python benchmarks/changing_rates.py sleeps      50mbit, where one rank sleeps 200 ms a step from step 300 on

Four ranks train `fashion` on an emulated accelerator, so that four ranks have two cores for what a recipe does. A lab changes rates by
the clock; the step that ran then is known from the ranks' own times. Prints these steps, what `auto` said, the recipe in force
and the median step of each stretch between two changes of either.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import accumulate, cycle, pairwise, takewhile
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

import gossamer
from gossamer.bench.lab import run_lab
from gossamer.bench.workloads import get
from gossamer.bench.workloads.emulated import emulated

FAST, SLOW = "1gbit", "50mbit"
MARK = "changing rates: "
BEFORE = 300  # steps before anything changes
READY = 20.0  # seconds from its start after which a rank trains: loading takes longer the first time


class Scenario(NamedTuple):
    rate: str
    later: list[str]  # as --then of `gossamer lab`
    steps: int
    sleeps: float = 0.0  # seconds of one rank's steps, from step 300 on


def falls(begin: float, low: float) -> Scenario:
    return Scenario(FAST, [f"{begin:g}s:{SLOW}", f"{begin + low:g}s:{FAST}"], 1200)


def flickers(begin: float, turn: float) -> Scenario:
    moments = takewhile(lambda at: at < 600, accumulate(cycle([turn]), initial=begin))
    return Scenario(FAST, [f"{at:g}s:{rate}" for at, rate in zip(moments, cycle([SLOW, FAST]))], 1000)


def train(steps: int, compute: str, sleeps: float) -> None:
    """What a rank does: `steps` steps under `auto`. The first rank tells when each of them ended, and under what."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    task = emulated(get("fashion"), compute)
    model = task.model()
    optimizer = task.optimizer(model)
    comm = gossamer.attach(model, optimizer, "auto")
    time.sleep(max(READY - _seconds_since_start(), 0.0))
    ends, force = list[float](), list[str]()
    for step in range(1, steps + 1):
        force.append(repr(comm.recipe.exchange))
        optimizer.zero_grad()
        loss = task.loss(model, task.batch(step, rank, 1))
        if step > BEFORE and rank == 1:
            time.sleep(sleeps)
        loss.backward()
        optimizer.step()
        ends.append(_seconds_since_start())
    if rank == 0:
        said = [(d.step, d.decision) for d in comm.ledger.decisions if d.rank == 0]
        print(MARK + json.dumps({"ends": ends, "force": force, "said": said}), flush=True)
    comm.finish()
    comm.detach()
    dist.destroy_process_group()


def _seconds_since_start() -> float:
    """Since this process began: from then on the lab counts."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def stretches(changes: list[int], force: list[str]) -> Iterator[tuple[int, int]]:
    """First and last step, from 1, of each stretch in which neither the rate nor the recipe changes."""
    switched = [i + 1 for i, (a, b) in enumerate(pairwise(force), start=1) if a != b]
    begins = sorted({1, *changes, *switched})
    yield from zip(begins, [*(b - 1 for b in begins[1:]), len(force)], strict=True)


def show(scenario: Scenario, ends: list[float], force: list[str], said: list[tuple[int, str]]) -> None:
    moments = [(float(at), rate) for at, rate in (each.split("s:") for each in scenario.later)]
    changes = [(1 + sum(end < at for end in ends), rate) for at, rate in moments]
    changes = [(step, rate) for step, rate in changes if step <= len(ends)]
    print(f"rates: {scenario.rate} from step 1" + "".join(f", {rate} from step {step}" for step, rate in changes))
    for step, decision in said:
        print(f"step {step}: {decision}")
    seconds = [b - a for a, b in pairwise([ends[0], *ends])]
    for first, last in stretches([step for step, _ in changes], force):
        rate = [scenario.rate, *(rate for step, rate in changes if step <= first)][-1]
        took = median(seconds[first - 1 : last])
        print(f"| {first} to {last} | {rate} | `{force[first - 1]}` | {1000 * took:.0f} ms |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=("falls", "flickers", "sleeps"))
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--compute", default="120ms")
    parser.add_argument(
        "--begin", type=float, default=63.0, help="seconds from the start of ranks until the rate first changes"
    )
    parser.add_argument("--low", type=float, default=110.0, help="seconds until a rate that fell rises again")
    parser.add_argument("--turn", type=float, default=7.0, help="seconds of each rate that flickers")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    scenario = {
        "falls": falls(asked.begin, asked.low),
        "flickers": flickers(asked.begin, asked.turn),
        "sleeps": Scenario(SLOW, [], 900, sleeps=0.2),
    }[asked.scenario]
    if asked.rank:
        train(scenario.steps, asked.compute, scenario.sleeps)
        return 0

    def line(rank: int, text: str) -> None:
        if text.startswith(MARK):
            show(scenario, **json.loads(text.removeprefix(MARK)))
        else:
            print(f"[{rank}] {text}", file=sys.stderr, flush=True)

    command = [sys.executable, *sys.argv, "--rank"]
    return run_lab(asked.hosts, scenario.rate, command, later=scenario.later, on_line=line).exit_code


if __name__ == "__main__":
    sys.exit(main())
