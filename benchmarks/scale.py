"""How much many ranks cost: ratios of processor time in one run, and peaks of memory.

python benchmarks/scale.py simulate [--rounds 6] [--only RECIPE ...]

`simulate` trains virtual ranks in `gossamer.simulate` and divides the processor time of a round by that of the gradients in it,
which the same model and data take by themselves. Every case has a process of its own, so that its peak of memory is its own;
gradients are timed before and after its rounds.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

import torch
from torch import nn

from gossamer.bench import workloads
from gossamer.recipe import Recipe
from gossamer.simulate import replicas_of_one_body, train

MEGABYTE = 1e6


class Case(NamedTuple):
    """A workload and a recipe on some ranks, and the most that a round may take, in times its gradients."""

    workload: str
    recipe: str
    size: int
    most: float


CASES = [
    Case("digits", "allreduce", 256, 3),
    Case("digits", "sgp", 256, 5),
    Case("digits", "scatter(qsgd()) + local_sgd(8)", 256, 5),
    Case("digits", "topk", 256, 8),
    Case("digits", "qsgd", 256, 15),
    Case("fashion", "qsgd", 64, 2),
]
BASE = Case("digits", "allreduce", 16, 3)  # whose peak of memory that of 256 ranks is compared with
MOST_PEAK, MOST_GROWTH = 1000.0, 1.2  # megabytes; times the peak at 16 ranks


class Measured(NamedTuple):
    """Processor seconds of a round, and of its gradients alone; megabytes at the peak."""

    round: float
    gradients: float
    peak: float

    @property
    def ratio(self) -> float:
        return self.round / self.gradients


def measure(case: Case, rounds: int) -> Measured:
    torch.set_num_threads(1)
    task = workloads.get(case.workload, batch_size=4)
    task.prepare()

    def backward(model: nn.Module, rank: int, step: int) -> float:
        loss = task.loss(model, task.batch(step, rank, case.size))
        loss.backward()
        return loss.item()

    lone, taken = task.model(), [0]

    def gradients() -> float:
        began, taken[0] = time.process_time(), taken[0] + 1
        for rank in range(case.size):
            lone.zero_grad()
            backward(lone, rank, taken[0])
        return time.process_time() - began

    steps = Recipe.of(case.recipe).schedule.shape.period
    ranks = replicas_of_one_body(case.recipe, task.model, task.optimizer, case.size)
    train(ranks, backward, steps)  # kernels are compiled and buffers made
    each, alone = list[float](), [gradients() for _ in range(3)][1:]
    for _ in range(rounds):
        began = time.process_time()
        train(ranks, backward, steps)
        each.append(time.process_time() - began)
        alone.append(gradients())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MEGABYTE
    return Measured(statistics.median(each), steps * statistics.median(alone), peak)


def apart(case: Case, rounds: int) -> Measured:
    """Measure a case in a process of its own."""
    asked = [sys.executable, __file__, "case", json.dumps(case), "--rounds", str(rounds)]
    done = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True)
    return Measured(*json.loads(done.stdout))


def verdict(value: float, most: float) -> str:
    return f"{value:.2f}, at most {most:g}: {'met' if value <= most else 'not met'}"


def simulate(rounds: int, only: list[str]) -> None:
    base = apart(BASE, rounds)
    for case in CASES:
        if only and case.recipe not in only:
            continue
        found = apart(case, rounds)
        name = f"{case.workload}, {case.size} ranks, {case.recipe}"
        print(f"{name}: a round over its gradients {verdict(found.ratio, case.most)}", flush=True)
        print(f"    {1e3 * found.round:.0f} ms over {1e3 * found.gradients:.0f} ms")
        if case.workload == BASE.workload:
            print(f"    peak in MB {verdict(found.peak, MOST_PEAK)}")
        if case[:2] == BASE[:2]:
            print(
                f"    peak over that with {BASE.size} ranks {verdict(found.peak / base.peak, MOST_GROWTH)}", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    simulating = commands.add_parser("simulate", help="rounds of many virtual ranks")
    simulating.add_argument("--only", nargs="*", default=[], help="recipes; all, if none are given")
    one = commands.add_parser("case", help="one case; started by the program itself")
    one.add_argument("case")
    for each in (simulating, one):
        each.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    if args.command == "case":
        print(json.dumps(measure(Case(*json.loads(args.case)), args.rounds)))
    else:
        simulate(args.rounds, args.only)


if __name__ == "__main__":
    main()
