"""A network ten times slower than the demo's, in virtual time: time to DDP's quality, and the share of the time that is computing.

python benchmarks/severe_virtual.py [RECIPE ...] [--severity 115] [--steps 480] [--patience 1.45] [--judge 10] [--seed 0] [--free-work]

benchmarks/severe.py does it in a lab, where four hosts share the cores of one machine and wait for whichever of them computes last.
Here each host has a core of its own, as machines have: the same programs train in the simulator, at a rate at which the fp32 model takes
--severity steps to send, computing takes what this machine needs alone, and encoding is charged as it is measured here. So models,
bytes and steps are real, and only the clock is virtual; it does not depend on what else this machine does, but for the two measurements.
1 T is the time of DDP's --steps steps without a network. A recipe's time is that of the first round whose models are as good as DDP's;
of recipes without rounds every --judge steps count as one.
"""

import argparse
import statistics
from dataclasses import dataclass

import torch
from severe import OptimizerOf, as_good, quality_of_ddp
from torch import nn

from gossamer.bench import workloads
from gossamer.bench.workloads import Workload
from gossamer.costs import Cluster, from_flags
from gossamer.planning.baselines import ddp
from gossamer.planning.measured_model import measure
from gossamer.planning.model_cost import ModelCost
from gossamer.planning.work import MeasuredWork
from gossamer.recipe import Recipe
from gossamer.simulate import costs_on, replicas, train

LINE_UP = (
    "diloco(60) + scatter(eden(2))",
    "diloco(100) + scatter(eden(2))",
    "diloco(150) + scatter(eden(2))",
    "diloco(100) + scatter(eden(1), answer=eden(2))",
    "streaming_diloco(60, delay=20) + scatter(eden(2))",
    "eager_diloco(60) + scatter(eden(2))",
    "sparse_loco",
)
LATENCY = 1e-3


@dataclass(frozen=True)
class Found:
    quality: float
    steps: int
    seconds: float
    utilisation: float
    sent: float  # bytes of a rank and step


def quality_of(task: Workload, models: list[dict[str, torch.Tensor]]) -> float:
    """The mean over ranks, each of which judges its own model; equal ones are judged once."""
    judge, known = task.model(), list[tuple[dict[str, torch.Tensor], float]]()
    out = list[float]()
    for state in models:
        value = next((v for old, v in known if all(torch.equal(old[n], x) for n, x in state.items())), None)
        if value is None:
            judge.load_state_dict(state)
            value = task.evaluate(judge)
            known.append((state, value))
        out.append(value)
    return statistics.mean(out)


def at_rate(task: Workload, multiple: float) -> OptimizerOf:
    """The workload's optimizer at a multiple of its learning rate."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = task.optimizer(model)
        for group in made.param_groups:
            group["lr"] *= multiple
        return made

    return optimizer


def race(
    task: Workload, text: str, target: float, cluster: Cluster, model: ModelCost, asked: argparse.Namespace
) -> Found:
    """Train by a recipe on virtual ranks, keep their models at the end of each round, and judge afterwards."""
    recipe, hosts = Recipe.of(text), asked.hosts
    alone = model.forward + model.backward + model.optimizer
    most = round(asked.patience * asked.steps)
    costs = costs_on(cluster, recipe, model, None if asked.free_work else MeasuredWork())
    fleet = replicas(recipe, task.model, at_rate(task, asked.lr), hosts, asked.seed)
    rounds = not recipe.schedule.shape.averages_gradients
    models = dict[int, list[dict[str, torch.Tensor]]]()

    def backward(net: nn.Module, rank: int, step: int) -> float:
        done = step - 1  # the model is that of the steps before this one
        if done > 0 and recipe.schedule.ends_round(done) and (rounds or done % asked.judge == 0):
            state = {name: x.clone() for name, x in net.state_dict().items()}
            models.setdefault(done, [{} for _ in range(hosts)])[rank] = state
        loss = task.loss(net, task.batch(step - 1, rank, hosts))
        loss.backward()
        return loss.item()

    run = train(fleet, backward, most, costs)
    ends = run.moments(most)
    sent = run.ledger.sent / hosts / most
    for done in sorted(models):
        quality = quality_of(task, models[done])
        if as_good(task, quality, target) or done == max(models):
            return Found(quality, done, ends[done - 1], most * alone / run.seconds, sent)
    raise SystemExit(f"{text} ends no round within {most} steps; give more --patience")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=LINE_UP)
    parser.add_argument("--workload", default="lm")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--severity", type=float, default=115.0)
    parser.add_argument("--steps", type=int, default=480, help="of DDP")
    parser.add_argument("--patience", type=float, default=1.45, help="recipes may take so many times DDP's steps")
    parser.add_argument(
        "--judge", type=int, default=10, help="steps between two looks at a model that is averaged at every step"
    )
    parser.add_argument("--seed", type=int, default=0, help="of data, models and what recipes draw")
    parser.add_argument("--lr", type=float, default=1.0, help="of DDP and recipes, a multiple of the workload's")
    parser.add_argument("--free-work", action="store_true", help="charge nothing for encoding")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    task = workloads.get(asked.workload, seed=asked.seed)
    task.prepare()
    net = task.model()
    optimizer = task.optimizer(net)
    model = measure(net, optimizer, lambda step: task.loss(net, task.batch(step - 1, 0, asked.hosts)), name=task.name)
    alone = model.forward + model.backward + model.optimizer
    rate = 4 * model.numel / (asked.severity * alone)
    cluster = from_flags(nodes=asked.hosts, rate=rate, latency=LATENCY, cores=1.0)
    dense = ddp(model, asked.hosts).seconds(cluster).step
    target = quality_of_ddp(task, at_rate(task, asked.lr), asked.hosts, asked.steps)
    print(
        f"severity {asked.severity:g}: computing {1e3 * alone:.0f} ms a step, links of {8e-6 * rate:.1f} Mbit/s; ddp: {target:.4f} after "
        f"{asked.steps} steps of {dense:.1f} s, {dense / alone:.0f} T, utilisation {alone / dense:.3f}",
        flush=True,
    )
    for text in asked.recipes:
        found = race(task, text, target, cluster, model, asked)
        print(
            f"{text:52} {'reached' if as_good(task, found.quality, target) else 'MISSED '} {found.quality:.4f} in {found.steps} steps, "
            f"{found.seconds / (asked.steps * alone):.3f} T, utilisation {found.utilisation:.3f}, sent {found.sent / 1e3:.1f} kB a step",
            flush=True,
        )


if __name__ == "__main__":
    main()
