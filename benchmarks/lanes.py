"""Where a step's time goes between computing and a slow wire, on hosts with a network of their own each.

python benchmarks/lanes.py [RECIPE ...] [--rate 200mbit] [--hosts 2] [--turns 20] [--steps 3] [--pin]

It makes the lab that it runs in. Computing alone and all recipes take short turns, whose first steps are not counted.
Milliseconds a step, medians over turns of the slower rank's clock: `step`; `wire`, what the card sent (by its own counter,
packet headers included) at the link's rate; `lane`, the processor time of encoding and decoding; `waited`, how long the
training loop stood still. `over` is (step - computing alone) / wire, which were 1 if nothing but the wire took time and
nothing hid it, with an interval that holds 95 of 100 resamplings of the turns. `--pin` gives each rank a core of its own;
without it the system may lend a rank's lane the other one. With more hosts than cores all compute at once and slowly, and
`over` says what such a lab can show of a recipe.
"""

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

import gossamer
from gossamer.lab import in_lab, own_counters, parse_rate, run_lab
from gossamer.workloads.transformer import Transformer

BARS = {"terngrad": 1.3}
WARM = 2  # turns in which kernels are compiled and memory is found
RESAMPLINGS = 2000


class Turn(NamedTuple):
    """A contender's mean step, in milliseconds; of the rank where it was longest."""

    step: float
    wire: float
    lane: float
    waited: float


class Contender:
    """One model, trained as a recipe says, or alone."""

    def __init__(self, kind: str, bits_per_second: float) -> None:
        torch.manual_seed(0)
        self.model = Transformer()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.ledger = None if kind == "compute" else gossamer.attach(self.model, self.optimizer, kind).ledger
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        self.rate = bits_per_second

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randint(2048, (4, 33), generator=self.generator)).backward()
        self.optimizer.step()

    def take_turn(self, steps: int) -> Turn:
        self.step()
        dist.barrier()
        before = self._clocks()
        for _ in range(steps):
            self.step()
        spent = [(b - a) / steps for a, b in zip(before, self._clocks(), strict=True)]
        longest = torch.tensor(spent, dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return Turn(*(1000 * longest).tolist())

    def _clocks(self) -> list[float]:
        busy, waited = (self.ledger.busy_seconds, self.ledger.exposed_seconds) if self.ledger else (0.0, 0.0)
        return [time.perf_counter(), 8 * own_counters().sent_bytes / self.rate, busy, waited]


def over(alone: Sequence[Turn], taken: Sequence[Turn]) -> float:
    """How many times the wire's time a step is longer than computing alone."""
    longer = statistics.median(t.step - a.step for t, a in zip(taken, alone, strict=True))
    return longer / statistics.median(t.wire for t in taken)


def interval(alone: Sequence[Turn], taken: Sequence[Turn]) -> tuple[float, float]:
    rng, found = random.Random(0), list[float]()
    for _ in range(RESAMPLINGS):
        drawn = rng.choices(range(len(taken)), k=len(taken))
        found.append(over([alone[i] for i in drawn], [taken[i] for i in drawn]))
    found.sort()
    return found[RESAMPLINGS // 40], found[-RESAMPLINGS // 40]


def line(name: str, turns: dict[str, list[Turn]]) -> str:
    step, wire, lane, waited = (statistics.median(column) for column in zip(*turns[name], strict=True))
    said = f"{name:40} step {step:6.1f}"
    if name == "compute":
        return said
    ratio, (low, high) = over(turns["compute"], turns[name]), interval(turns["compute"], turns[name])
    said += f"  wire {wire:6.1f}  lane {lane:5.1f}  waited {waited:6.1f}  over {ratio:5.2f} [{low:.2f}, {high:.2f}]"
    bar = BARS.get(name)
    if bar is None:
        return said
    return said + f"  bar {bar}: " + ("met" if high <= bar else "not met" if low > bar else "open, within the noise")


def measure(args: argparse.Namespace) -> None:
    """One rank's part."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if args.pin:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    dist.init_process_group("gloo")
    names = ["compute", *args.recipes]
    contenders = {name: Contender(name, args.bits) for name in names}
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    rng = random.Random(0)  # the same on both ranks, who must take the same turns
    for turn in range(WARM + args.turns):
        for name in rng.sample(names, len(names)):
            taken = contenders[name].take_turn(args.steps)
            if turn >= WARM:
                turns[name].append(taken)
    if rank == 0:
        print(f"load {os.getloadavg()[0]:.1f} (its own is {args.hosts}), {args.rate}{', pinned' if args.pin else ''}")
        for name in names:
            print(line(name, turns))
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipes", nargs="*", default=["terngrad", "terngrad + bucket(8)", "qsgd", "topk", "powersgd"])
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--pin", action="store_true")
    args = parser.parse_args()
    args.bits = parse_rate(args.rate)
    if args.bits is None:
        parser.error("a link without a limit has no wire time")
    if args.pin and args.hosts > len(os.sched_getaffinity(0)):
        parser.error(f"--pin: {args.hosts} hosts need as many cores")
    if in_lab():
        measure(args)
    sys.exit(run_lab(args.hosts, args.rate, [sys.executable, *sys.argv]).exit_code)


if __name__ == "__main__":
    main()
