"""Simulated beside measured: seconds a step on the simulator's clock, and those of the lab with an emulated accelerator.

python benchmarks/simulated.py [RECIPE ...] [--cells "2:100ms 4:300ms"] [--rates "200mbit 1gbit"] [--turns 2] [--chunk 12]

Cells, recipes, lab and bars are those of benchmarks/planner.py; of the simulator's run the steps of a later chunk count. It wants a
quiet machine. Messages of gossip cost the simulator's processor nothing, and its recipes are expected below the lab's step.
"""

import argparse
import statistics

import torch
from planner import CORES, LATENCY, RECIPES, bar, cost_of, frozen, steps_of
from torch import nn

from gossamer.bench import workloads
from gossamer.bench.lab import parse_rate
from gossamer.costs import Cluster, from_flags
from gossamer.planning.model_cost import ModelCost
from gossamer.planning.work import MeasuredWork
from gossamer.simulate import costs_on, replicas, train


def simulated(
    recipe: str, task: workloads.Workload, model: ModelCost, cluster: Cluster, work: MeasuredWork, chunk: int
) -> float:
    """Seconds a step, after a first chunk of steps."""

    def backward(net: nn.Module, rank: int, step: int) -> float:
        loss = task.loss(net, task.batch(step - 1, rank, cluster.size))
        loss.backward()
        return loss.item()

    fleet = replicas(recipe, task.model, task.optimizer, cluster.size)
    costs = costs_on(cluster, recipe, model, work)
    train(fleet, backward, chunk, costs)
    return train(fleet, backward, chunk, costs).seconds / chunk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--workload", default="lm")
    parser.add_argument("--cells", default="2:100ms 4:300ms")
    parser.add_argument("--rates", default="200mbit 1gbit")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=16, help="steps; whole rounds of every recipe")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    task, work, errors = workloads.get(asked.workload), MeasuredWork(), list[float]()
    task.prepare()
    print(f"costs by code {frozen()}")
    for text in asked.cells.split():
        hosts, _, compute = text.partition(":")
        model = cost_of(task, compute)
        for rate in asked.rates.split():
            bits = parse_rate(rate)
            assert bits is not None
            cluster = from_flags(nodes=int(hosts), rate=bits / 8, latency=LATENCY, cores=CORES / int(hosts))
            rows = {row.recipe: row for row in steps_of(asked.recipes, int(hosts), rate, compute, asked)}
            for recipe in asked.recipes:
                found = simulated(recipe, task, model, cluster, work, asked.chunk)
                measured = rows[recipe].step_ms / 1e3
                errors.append(found / measured - 1)
                print(
                    f"{hosts} hosts, {compute}, {rate}, {recipe}: simulated {1e3 * found:.1f} ms, "
                    f"measured {1e3 * measured:.1f} ms, {100 * errors[-1]:+.1f} %",
                    flush=True,
                )
    off = sorted(abs(error) for error in errors)
    bar("median error of a step", statistics.median(off), 0.06)
    bar("nine in ten", off[int(0.9 * (len(off) - 1))], 0.12)
    bar("worst", off[-1], 0.25)


if __name__ == "__main__":
    main()
