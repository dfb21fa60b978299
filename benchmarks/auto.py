"""Does `auto` choose what is best? Twelve settings, each beside dense and each allowed recipe alone in the same lab.

    python benchmarks/auto.py                       all settings, three runs each; goes on where it was cut off
    python benchmarks/auto.py --only 2x100-50mbit --runs 1 --steps 80

Ranks are an emulated accelerator's: `lm` computes for the given milliseconds without using a processor. Prints a row for each
setting: the mean step of each, its measuring included, and how far auto is from the best one allowed and from dense.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from gossamer.bench.cli.output import RECORD
from gossamer.bench.record import Record

SHAPES = ((2, 100), (4, 300), (4, 600))  # hosts, and milliseconds that each computes for
RATES = ("50mbit", "200mbit", "1gbit", "unshaped")
RECIPES = ("allreduce", "auto", "bf16", "int8", "qsgd")
SETTINGS = {f"{hosts}x{ms}-{rate}": (hosts, ms, rate) for hosts, ms in SHAPES for rate in RATES}


def run(setting: str, seed: int, steps: int, out: Path) -> dict[str, float]:
    """Mean seconds a step of each recipe, from one comparison in a lab."""
    hosts, ms, rate = SETTINGS[setting]
    folder = out / f"{setting}-{steps}-{seed}"
    if not list(folder.rglob(RECORD)):
        words = ["compare", *RECIPES, "--workload", "lm", "--hosts", str(hosts), "--rate", rate, "--steps", str(steps)]
        more = [
            "--chunk",
            "25",
            "--patience",
            "1",
            "--seed",
            str(seed),
            "--compute",
            f"{ms}ms",
            "--timing",
            "--out",
            str(folder),
        ]
        subprocess.run([sys.executable, "-m", "gossamer", *words, *more], check=True)
    runs = Record.read(next(folder.rglob(RECORD))).runs
    return {one.name: one.steps[-1].seconds / one.steps[-1].step for one in runs}


def row(setting: str, found: list[dict[str, float]]) -> str:
    mean = {name: sum(each[name] for each in found) / len(found) for name in RECIPES}
    best = min(mean[name] for name in RECIPES if name != "auto")
    said = " | ".join(f"{1000 * mean[name]:.0f}" for name in RECIPES)
    return f"| {setting} | {said} | {mean['auto'] / best - 1:+.1%} | {mean['auto'] / mean['allreduce'] - 1:+.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SETTINGS, nargs="*")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("benchmarks-auto"))
    args = parser.parse_args()
    print(f"| setting | {' | '.join(RECIPES)} | auto above the best | above dense |")
    print("| --- " * (len(RECIPES) + 3) + "|")
    for setting in args.only or SETTINGS:
        print(row(setting, [run(setting, seed, args.steps, args.out) for seed in range(args.runs)]), flush=True)


if __name__ == "__main__":
    main()
