"""What methods cost in quality and in steps, each tuned with the same budget of trials: the table of docs/quality.md.

python benchmarks/quality.py RECIPE ... --workload lm --out runs/quality-lm [--trials 6] [--steps 48] [--seeds 3] [--lab LAB.json]

First a search, as `gossamer tune` makes it: as many trials for everybody, dense gradients included, over the learning rate
and the knobs that cost no bytes. The two best of each are trained once more on another seed, and the better one of their
worse ends goes on: a rate that one seed bears and the next does not is nobody's best. That one is trained on seeds that
nobody searched on, up to twice the steps, judged every few: the quality after `--steps`, with what it is above dense's
(95 % bounds), and the steps to the quality that dense had then, in a straight line between two judgements. If it diverges
on one of them the other one of the two has its turn, and the table says so. Ranks are virtual, so the network and the load
of this machine do not matter; what a step takes in a lab comes from the record of `gossamer bench steps`, if one is given.
All that is done is kept after every run: the same command goes on where it was.
"""

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch

from gossamer.bench.tune import Search, SearchPlan
from gossamer.bench.tune.points import Setting
from gossamer.bench.tune.ranking import Gap, gap_of
from gossamer.bench.tune.record import Trial, Tuning
from gossamer.bench.tune.space import SearchOverride
from gossamer.bench.tune.training import Diverged, batches_of, crew_of, judge, parameters_of, run
from gossamer.bench.workloads import find, get
from gossamer.core import files
from gossamer.recipe import Recipe
from gossamer.simulate import bytes_per_step, train

KEPT = files.FileKind("record of a benchmark", ())

DENSE = "ddp"
RANKS = 4
FINALISTS, FINAL_SEED = 2, 1
FIRST_SEED = 10  # of those that nobody searched on
APART = 4  # steps between two judgements


@dataclass
class Curve:
    """The best of one recipe, trained once more."""

    contender: str
    recipe: str
    lr: float
    seed: int
    steps: list[int] = field(default_factory=list)
    qualities: list[float] = field(default_factory=list)
    error: str = ""

    def diverges(self, sign: int) -> bool:
        """Whether it came to what is no number, or ended worse than it was at its first judgement."""
        return bool(self.error) or not sign * self.qualities[-1] <= sign * self.qualities[0]

    def at(self, step: int) -> float:
        """The quality after so many steps: the last judgement up to there."""
        known = [q for s, q in zip(self.steps, self.qualities, strict=True) if s <= step]
        return known[-1] if known and not self.error else math.nan

    def reaches(self, quality: float, sign: int) -> float:
        """Steps to a quality, between two judgements in a straight line; not a number if it did not get there."""
        before = (0, math.inf)
        for step, found in zip(self.steps, (sign * q for q in self.qualities), strict=True):
            if found <= sign * quality:
                return _crossing(before, (step, found), sign * quality)
            before = (step, found)
        return math.nan


class Judged(NamedTuple):
    """A finalist on the seeds that judge, and the rates of those before it that diverged there."""

    setting: Setting
    curves: list[Curve]
    struck: list[float]

    def diverges(self, sign: int) -> bool:
        return any(curve.diverges(sign) for curve in self.curves)


def _crossing(before: tuple[int, float], after: tuple[int, float], at: float) -> float:
    if not math.isfinite(before[1]):
        return float(after[0])
    return before[0] + (after[0] - before[0]) * (before[1] - at) / (before[1] - after[1])


def main() -> None:
    asked = _arguments()
    torch.set_num_threads(1)
    out = Path(asked.out)
    out.mkdir(parents=True, exist_ok=True)
    search = _search(asked, out)
    finalists = {name: _finalists(search, name, asked, out) for name in search.plans}
    text = table(asked, search, judge_all(finalists, Curves(asked, out), search.tuning.sign()))
    (out / "table.md").write_text(text)
    print(text)


def _search(asked: argparse.Namespace, out: Path) -> Search:
    recipes = {DENSE: "allreduce", **{text: text for text in asked.recipes}}
    wishes = [SearchOverride.of(text) for text in (f"lr={asked.lr}", *asked.knob)]
    question = SearchPlan(
        recipes, asked.workload, asked.shards, asked.trials, steps=asked.steps, repeats=0, seed=0, wishes=wishes
    )
    search = Search(question, " ".join(sys.argv))
    if (out / "record.json").exists():
        known = Tuning.read(out / "record.json")
        refuse_another(known, search.tuning)
        search.tuning.trials = [t for t in known.trials if t.contender in recipes and t.number < asked.trials]
        search.tuning.untrained = known.untrained

    def tell(tuning: object, trial: Trial) -> None:
        search.tuning.write(out / "record.json")
        print(
            f"{trial.contender:40} lr {trial.lr:.3g} {trial.values} {trial.quality:.4f} {trial.seconds:.0f} s",
            flush=True,
        )

    search.run(tell)
    return search


def refuse_another(known: Tuning, asked: Tuning) -> None:
    """What is kept in a folder is of one search: with other steps or knobs its trials would be other trials."""
    for name in ("workload", "shards", "ranks", "steps", "seed"):
        if (was := getattr(known, name)) != (now := getattr(asked, name)):
            told = f"{name} was {was}, and is {now} now"
            raise SystemExit(f"the record there is of another search: {told}; give another --out")
    before = {each.name: (each.recipe, each.knobs) for each in known.contenders}
    for each in asked.contenders:
        if before.get(each.name, (each.recipe, each.knobs)) != (each.recipe, each.knobs):
            raise SystemExit(f"the record there is of another search: {each.name} had other knobs; give another --out")


def keep(path: Path, text: str) -> None:
    """Write all of it or nothing: a full disk, or an end in the middle, leaves what was there."""
    files.write(path, text, KEPT, force=True)


def _finalists(search: Search, name: str, asked: argparse.Namespace, out: Path) -> list[Setting]:
    """The two that were best on the search's seed, first the one whose worse end on two is better; none that diverged."""
    sign = search.tuning.sign()
    ended = [t for t in search.tuning.trials if t.contender == name and math.isfinite(t.quality)]
    first = sorted(ended, key=lambda t: sign * t.quality)[:FINALISTS]
    again = [_again(search.plans[name][1][t.number], asked, out) for t in first]
    worse = {t.number: max(sign * t.quality, sign * q) for t, q in zip(first, again, strict=True) if math.isfinite(q)}
    return [search.plans[name][1][n] for n in sorted(worse, key=lambda n: worse[n])]


def _again(setting: Setting, asked: argparse.Namespace, out: Path) -> float:
    """The quality on another seed; what is known is not trained again."""
    kept, key = out / "finals.json", f"{setting.recipe!r} at {setting.lr:.6g}"
    known = json.loads(kept.read_text()) if kept.exists() else {}
    if key not in known:
        workload = get(asked.workload, seed=FINAL_SEED, shards=asked.shards)
        known[key] = run(workload, setting.recipe, setting.lr, asked.steps, RANKS).quality
        keep(kept, json.dumps(known))
        print(f"{key} again: {known[key]:.4f}", flush=True)
    return known[key]


class Curves:
    """What was trained on the seeds that judge; what is known is not trained again."""

    def __init__(self, asked: argparse.Namespace, out: Path) -> None:
        self._asked, self._kept = asked, out / "curves.json"
        known = [Curve(**c) for c in json.loads(self._kept.read_text())] if self._kept.exists() else []
        self._done = {(c.contender, c.recipe, c.lr, c.seed): c for c in known}
        self.seeds, self.steps = range(FIRST_SEED, FIRST_SEED + asked.seeds), asked.steps
        self._sign = 1 if find(asked.workload).lower_is_better else -1

    def of(self, name: str, setting: Setting, seed: int, goal: float) -> Curve:
        key = (name, repr(setting.recipe), setting.lr, seed)
        if key not in self._done or not self._is_whole(self._done[key], goal):
            gc.collect()
            began = time.perf_counter()
            curve = self._done[key] = _curve(self._asked, name, setting, seed, goal)
            keep(self._kept, json.dumps([asdict(c) for c in self._done.values()]))
            print(f"{name:40} seed {seed} {curve.qualities[-1:]} {time.perf_counter() - began:.0f} s", flush=True)
        return self._done[key]

    def _is_whole(self, curve: Curve, goal: float) -> bool:
        """False if it ended at the goal of another dense, which fewer trials had chosen, and is not at this one."""
        ended = curve.error or curve.steps[-1] >= _most(curve.contender, self.steps)
        return bool(ended) or self._sign * curve.qualities[-1] <= self._sign * goal


def judge_all(finalists: Mapping[str, list[Setting]], curves: Curves, sign: int) -> dict[str, Judged | None]:
    """Each recipe's first finalist that all seeds bear, or the last one; none where there was none. Dense comes first."""
    judged, goals = dict[str, Judged | None](), dict[int, float]()
    for name, settings in finalists.items():
        judged[name] = found = _judged(name, settings, goals, curves, sign)
        if name != DENSE:
            continue
        if found is None or found.diverges(sign):
            raise SystemExit("dense gradients diverge at the best of their rates: ask for lower ones with --lr")
        goals = {c.seed: c.at(curves.steps) for c in found.curves}
    return judged


def _judged(
    name: str, settings: Sequence[Setting], goals: Mapping[int, float], curves: Curves, sign: int
) -> Judged | None:
    found, struck = None, list[float]()
    for setting in settings:
        trained = [curves.of(name, setting, seed, goals.get(seed, math.nan)) for seed in curves.seeds]
        found = Judged(setting, trained, struck)
        if not found.diverges(sign):
            return found
        struck = [*struck, setting.lr]
    return found


def _curve(asked: argparse.Namespace, name: str, best: Setting, seed: int, goal: float) -> Curve:
    """Up to twice the steps; who is there after the steps of all need go no further."""
    workload = get(asked.workload, seed=seed, shards=asked.shards)
    sign = 1 if workload.lower_is_better else -1
    crew, backward = crew_of(workload, best.recipe, best.lr, RANKS), batches_of(workload, RANKS)
    curve = Curve(name, repr(best.recipe), best.lr, seed)
    while not curve.steps or curve.steps[-1] < _most(name, asked.steps):
        try:
            train(crew, backward, APART)
        except Diverged as error:
            curve.error = str(error)
            break
        curve.steps.append(APART + (curve.steps[-1] if curve.steps else 0))
        curve.qualities.append(judge(workload, crew))
        if curve.steps[-1] >= asked.steps and sign * curve.qualities[-1] <= sign * goal:
            break
    return curve


def _most(name: str, steps: int) -> int:
    """Steps that a recipe may take to dense's quality."""
    return steps if name == DENSE else 2 * steps


def table(asked: argparse.Namespace, search: Search, judged: Mapping[str, Judged | None]) -> str:
    """One row for each recipe: what it sends, how good it is after the steps of all, and when it is as good as dense."""
    sign, parameters = search.tuning.sign(), parameters_of(search.workload.model())
    lab = json.loads(Path(asked.lab).read_text()) if asked.lab else {}
    yardstick = judged[DENSE]
    assert yardstick is not None, "judge_all has refused this"
    dense = {c.seed: c.at(asked.steps) for c in yardstick.curves}
    full = bytes_per_step(Recipe.of("allreduce"), parameters, RANKS)
    head = [
        "recipe, as tuned",
        "rate",
        "bytes",
        f"{search.tuning.metric} after {asked.steps}",
        "above dense",
        "steps to dense's",
    ]
    rows = [[*head, *(["lab time, of dense's"] if lab else [])]]
    for name, found in judged.items():
        if found is None or found.diverges(sign):
            rows.append([f"`{name}`", *["-"] * (len(rows[0]) - 2), "diverges"])
            continue
        best, mine, struck = found
        sent = bytes_per_step(best.recipe, parameters, RANKS)
        gap = gap_of([sign * (c.at(asked.steps) - dense[c.seed]) for c in mine]) if len(mine) > 1 else None
        steps = [c.reaches(dense[c.seed], sign) for c in mine]
        row = [
            f"`{best.recipe if name != DENSE else DENSE}`",
            f"{best.lr:.2g}" + "".join(f" ({lr:.2g} diverges)" for lr in struck),
            _share(sent / full),
            f"{fmean(c.at(asked.steps) for c in mine):.4f}",
            "" if name == DENSE else _bounds(gap),
            _reached(steps, asked.steps),
        ]
        if lab:
            ratio = lab[name] / lab[DENSE] if name in lab else math.nan
            row.append("-" if math.isnan(ratio * sum(steps)) else f"{ratio * fmean(steps) / asked.steps:.2f}")
        rows.append(row)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]]) + "\n"


def _share(of: float) -> str:
    """A recipe's bytes beside dense's.

    >>> _share(0.04), _share(1.0), _share(2.0)
    ('1/25', '1', '2')
    """
    return f"1/{1 / of:.3g}" if of < 1 else f"{of:.3g}"


def _bounds(gap: Gap | None) -> str:
    return f"{gap.mean:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}]" if gap is not None else "-"


def _reached(steps: list[float], asked: int) -> str:
    there = [s for s in steps if math.isfinite(s)]
    if not there:
        return f"over {2 * asked}"
    few = "" if len(there) == len(steps) else f" ({len(there)} of {len(steps)})"
    return f"{fmean(there):.0f}{few}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--workload", default="lm")
    parser.add_argument("--shards", default="iid")
    parser.add_argument("--out", required=True)
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", default="0.25..8")
    parser.add_argument("--knob", action="append", default=[])
    parser.add_argument("--lab", help="a JSON object: milliseconds a step in the lab, by recipe")
    return parser.parse_args()


if __name__ == "__main__":
    main()
