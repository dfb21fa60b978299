"""Recipes beside dense gradients at one rate, which is dense's: what a change in mid-run keeps. A table of docs/quality.md.

python benchmarks/at_rate.py WORKLOAD RATE STEPS RECIPE ...

`RATE` is a multiple of the workload's learning rate. Four virtual ranks, on the seeds that `benchmarks/quality.py` judges by.
"""

import sys
from statistics import fmean

import torch

from gossamer.bench.tune.ranking import gap_of
from gossamer.bench.tune.training import run
from gossamer.bench.workloads import get
from gossamer.recipe import Recipe

DENSE, RANKS, SEEDS = "allreduce", 4, (10, 11, 12)


def main(name: str, rate: str, steps: str, *recipes: str) -> None:
    torch.set_num_threads(1)
    found = {
        text: [_quality(name, seed, text, float(rate), int(steps)) for seed in SEEDS] for text in (DENSE, *recipes)
    }
    sign = 1 if get(name).lower_is_better else -1
    print(f"| `{DENSE}` | {fmean(found[DENSE]):.4f} | |")
    for text in recipes:
        gap = gap_of([sign * (mine - dense) for mine, dense in zip(found[text], found[DENSE], strict=True)])
        print(f"| `{text}` | {fmean(found[text]):.4f} | {gap.mean:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}] |")


def _quality(name: str, seed: int, text: str, rate: float, steps: int) -> float:
    return run(get(name, seed=seed), Recipe.of(text), rate, steps, RANKS).quality


if __name__ == "__main__":
    main(*sys.argv[1:])
