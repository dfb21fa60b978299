"""Does `auto` choose what is best? Twelve settings, each beside dense and each allowed recipe alone in the same lab.

    python benchmarks/auto.py                       all settings, three runs each; goes on where it was cut off
    python benchmarks/auto.py --only 2x100-50mbit --seeds 0 --made 100 --alone 24
    python benchmarks/auto.py --virtual --steps 4000

Ranks are an emulated accelerator's: `lm` computes for the given milliseconds without using a processor. Prints a row for each
setting: the mean step of each, its measuring included, and how far auto is from the best one allowed and from dense. With `--made`
and `--alone`, which are less than `--steps`, auto and the others make so many steps only, and each step after them is taken to last
as long as the median of their last third: a dense step at 50 mbit takes seconds.

`--virtual` does the same on the simulator's clock, with gradients of noise in place of `lm`'s. Encoding takes no time there, so
it shows how auto chooses and what its measuring costs, and not which recipe pays.
"""

import argparse
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import nn

from gossamer.bench import workloads
from gossamer.bench.cli.output import RECORD
from gossamer.bench.lab import parse_rate
from gossamer.bench.record import Record, Run
from gossamer.costs import from_flags
from gossamer.planning.measured_model import untrained
from gossamer.planning.work import NoWork
from gossamer.simulate import costs_on, replicas_of_one_body, train

SHAPES = ((2, 100), (4, 300), (4, 600))  # hosts, and milliseconds that each computes for
RATES = ("50mbit", "200mbit", "1gbit", "unshaped")
RECIPES = ("allreduce", "auto", "bf16", "int8", "qsgd", "terngrad(last='qsgd')")  # dense, and what auto may choose
UNSHAPED, LATENCY = 5e9, 50e-6  # bytes per second, and seconds of a message, in virtual time
FEW = 10  # steps of recipes that take as long at each of them, in virtual time
SETTINGS = {f"{hosts}x{ms}-{rate}": (hosts, ms, rate) for hosts, ms in SHAPES for rate in RATES}


def run(setting: str, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """Mean seconds a step of each recipe, in labs of this setting."""
    alone = [recipe for recipe in RECIPES if recipe != "auto"]
    runs = [
        *compared(setting, alone, seed, args.alone, args.out),
        *compared(setting, ["auto"], seed, args.made, args.out),
    ]
    said = "; ".join(f"{step}: {what}" for one in runs for step, what in one.decisions)  # only auto decides anything
    print(f"{setting}, run {seed}: {said or 'dense throughout'}", file=sys.stderr, flush=True)
    return {one.name: mean_step([step.seconds for step in one.steps], args.steps) for one in runs}


def compared(setting: str, recipes: list[str], seed: int, steps: int, out: Path) -> list[Run]:
    hosts, ms, rate = SETTINGS[setting]
    folder = out / f"{setting}-{recipes[0]}-{steps}-{seed}"
    if (known := whole(folder / RECORD)) is not None:
        return known
    words = ["compare", *recipes, "--workload", "lm", "--hosts", str(hosts), "--rate", rate, "--steps", str(steps)]
    more = ["--chunk", "25", "--patience", "1", "--seed", str(seed), "--compute", f"{ms}ms", "--timing"]
    subprocess.run(
        [sys.executable, "-m", "gossamer", *words, *more, "--out", str(folder)], check=True, stdout=sys.stderr
    )
    return Record.read(folder / RECORD).runs


def whole(path: Path) -> list[Run] | None:
    """The runs of a record; None where there is none, or it was cut off: it is written while its runs train."""
    try:
        runs = Record.read(path).runs
    except (OSError, ValueError):
        return None
    return runs if all(run.status == "ok" for run in runs) else None


def mean_step(ends: list[float], steps: int) -> float:
    """The mean of so many steps, from the moments at which those ended that were made."""
    made = [end - begin for begin, end in pairwise((0.0, *ends))]
    later = median(made[-max(len(made) // 3, 1) :])
    return (ends[-1] + (steps - len(ends)) * later) / steps


def run_virtual(setting: str, steps: int) -> dict[str, float]:
    """Mean seconds a step of each recipe on the simulator's clock."""
    hosts, ms, rate = SETTINGS[setting]
    task, bits = workloads.get("lm"), parse_rate(rate)
    cluster = from_flags(nodes=hosts, rate=UNSHAPED if bits is None else bits / 8, latency=LATENCY)
    model = replace(untrained(task.model(), ms / 1000, name="lm", memory_rate=cluster.memory_rate), on_cores=False)
    noise = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in model.shapes.values()]

    def backward(net: nn.Module, rank: int, step: int) -> float:
        for parameter, gradient in zip(net.parameters(), noise, strict=True):
            parameter.grad = gradient.clone()
        return 0.0

    def mean_step(recipe: str) -> float:
        many = steps if recipe == "auto" else min(steps, FEW)
        fleet = replicas_of_one_body(recipe, task.model, task.optimizer, hosts)
        return train(fleet, backward, many, costs_on(cluster, recipe, model, NoWork())).seconds / many

    return {recipe: mean_step(recipe) for recipe in RECIPES}


def row(setting: str, found: list[dict[str, float]]) -> str:
    mean = {name: sum(each[name] for each in found) / len(found) for name in RECIPES}
    best = min(mean[name] for name in RECIPES if name != "auto")
    said = " | ".join(f"{1000 * mean[name]:.0f}" for name in RECIPES)
    return f"| {setting} | {said} | {mean['auto'] / best - 1:+.1%} | {mean['auto'] / mean['allreduce'] - 1:+.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SETTINGS, nargs="*")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run each")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--made", type=int, help="steps that auto makes")
    parser.add_argument("--alone", type=int, help="steps that every other recipe makes")
    parser.add_argument("--virtual", action="store_true", help="on the simulator's clock")
    parser.add_argument("--out", type=Path, default=Path("benchmarks-auto"))
    args = parser.parse_args()
    args.made, args.alone = args.made or args.steps, args.alone or args.steps
    print(f"| setting | {' | '.join(RECIPES)} | auto above the best | above dense |")
    print("| --- " * (len(RECIPES) + 3) + "|")
    for setting in args.only or SETTINGS:
        if args.virtual:
            print(row(setting, [run_virtual(setting, args.steps)]), flush=True)
            continue
        print(row(setting, [run(setting, seed, args) for seed in args.seeds]), flush=True)


if __name__ == "__main__":
    main()
