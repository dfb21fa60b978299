"""Does a recipe pay below the rate up to which `gossamer plan` says so, and not above? In the lab, with an emulated accelerator.

python benchmarks/break_even.py [RECIPE ...] [--hosts 2] [--compute 100ms] [--workload lm] [--turns 2] [--chunk 16]

For each recipe the highest rate is planned at which a step takes at most .95 of DDP's; then steps of both are measured, in one lab and
in turns, at half and at twice that rate. The sign is right if the recipe's share of DDP's step is below .95 at half of it and above at
twice. Where a recipe is planned to pay at every rate it is measured at 10 Gbit/s, and where at none at 10 Mbit/s.
"""

import argparse
import sys
from math import inf

import torch
from planner import CORES, cost_of, frozen, steps_of

from gossamer.bench import workloads
from gossamer.costs import Cluster, from_flags
from gossamer.planning.baselines import ddp
from gossamer.planning.model_cost import ModelCost
from gossamer.planning.plan import Prepared, prepare
from gossamer.planning.rates import TIE, pays_between
from gossamer.planning.work import MeasuredWork

RECIPES = ("terngrad(last='qsgd')", "qsgd", "local_sgd(8)")
PAYS = 1 - TIE
SLOW, FAST = 1.25e6, 1.25e9  # 10 Mbit/s and 10 Gbit/s, about as fast as loopback is, in bytes per second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--compute", default="100ms")
    parser.add_argument("--workload", default="lm")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=16)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    workload, work = workloads.get(asked.workload), MeasuredWork()
    workload.prepare()
    model = cost_of(workload, asked.compute)
    cluster = from_flags(nodes=asked.hosts, rate=125e6, latency=50e-6, cores=CORES / asked.hosts)
    print(f"plans made by code {frozen()}; {asked.hosts} hosts that compute for {asked.compute}", flush=True)
    right = list[bool]()
    for recipe in asked.recipes:
        plan = prepare(recipe, model, cluster, work)
        edge = up_to(plan, model, cluster)
        for rate, below in around(edge):
            right += decided(recipe, rate, below, ratio(plan, model, cluster, rate), edge, asked)
    print(f"signs that are right: {sum(right)} of {len(right)}")


def ratio(plan: Prepared, model: ModelCost, cluster: Cluster, rate: float) -> float:
    """Planned seconds of a step over those of DDP's."""
    there = cluster.at_rate(rate)
    return plan.seconds(there).step / ddp(model, cluster.size).seconds(there).step


def up_to(plan: Prepared, model: ModelCost, cluster: Cluster) -> float:
    """The highest rate at which a recipe pays, in bytes per second; 0 if there is none, and inf if there is no end to it."""
    found = pays_between(lambda rate: ratio(plan, model, cluster, rate))
    return found[-1].high if found else 0.0


def around(edge: float) -> list[tuple[float, bool]]:
    """Rates to measure at, and whether the recipe should pay there; one each where it is planned to pay at every rate, or at none."""
    if edge == inf:
        return [(FAST, True)]
    return [(edge / 2, True), (2 * edge, False)] if edge else [(SLOW, False)]


def decided(
    recipe: str, rate: float, below: bool, planned: float, edge: float, asked: argparse.Namespace
) -> list[bool]:
    """Measure one recipe at one rate, and print what was found; empty where the noise leaves it open."""
    rows = {r.recipe: r for r in steps_of([recipe], asked.hosts, f"{8e-6 * rate:.0f}mbit", asked.compute, asked)}
    mine, dense = rows[recipe], rows["ddp"]
    found = mine.step_ms / dense.step_ms
    low, high = mine.low_ms / dense.high_ms, mine.high_ms / dense.low_ms
    right = (found < PAYS) == below
    is_open = low < PAYS < high
    word = "right" if right else "wrong"
    print(
        f"{recipe:24} planned to pay up to {8e-6 * edge:.0f} Mbit/s; at {8e-6 * rate:.0f}: planned {planned:.3f} of DDP's step, measured {found:.3f} "
        f"({mine.step_ms:.0f} of {dense.step_ms:.0f} ms; ranges of steps give {low:.2f} to {high:.2f}): {word}{', within the noise' if is_open else ''}",
        flush=True,
    )
    return [] if is_open else [right]


if __name__ == "__main__":
    sys.exit(main())
