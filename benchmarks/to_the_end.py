"""Recipes trained through a whole schedule of the learning rate, beside dense: the runs and the tables of docs/quality/end.md.

    python -m benchmarks.to_the_end run --minutes 60            what matters most first, until the minutes are over
    python -m benchmarks.to_the_end run topk "qsgd(bits=2)" --rates 0.5,1,2 --seeds 0,1,2      these runs and no others
    python -m benchmarks.to_the_end left                        what is still to do, and what it will take
    python -m benchmarks.to_the_end table                       the page, README's column and what `gossamer recipes` says

Ranks are virtual, in one process, so neither the load nor the network of this machine matters. Every finished run is a record
in docs/quality/end/. A run that is killed begins again, and the same command goes on with what is missing. Seeds 0 to 2
choose rates and defaults; 40 to 42 are what the tables show, and nothing is chosen by them.
"""

import argparse
import itertools
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import get_args

import torch
from benchmarks.end import contenders, fine_tuning, tables, training
from benchmarks.end.records import DENSE, ROOT, Job, Plan, Run, Study, read_all

from gossamer.bench.workloads import find


def main() -> None:
    asked = _arguments()
    if asked.what == "table":
        print(*tables.write(read_all()), sep="\n")
        return
    torch.set_num_threads(1)
    study = Study(asked.workload, asked.steps, asked.plan, asked.ranks, asked.then)
    known = tables.known_of(read_all(), study, find(study.then or study.workload).metric)
    wanted = _wanted(asked, study, known)
    if asked.what == "left":
        _tell(wanted, known)
    else:
        _train(study, wanted, known, asked.minutes)


def _wanted(asked: argparse.Namespace, study: Study, known: dict[Job, Run]) -> Iterator[Job]:
    """The runs that are named, or all in the order of their importance."""
    some = asked.recipes or (contenders.TWELVE if asked.twelve else contenders.all_presets(study))
    if asked.seeds is None and asked.rates is None:
        return contenders.jobs(some, known)
    rates, seeds = asked.rates or [1.0], asked.seeds or [*contenders.JUDGED]
    named = (Job(*each) for each in itertools.product(asked.recipes or [DENSE, *some], rates, seeds))
    return (job for job in named if job not in known)


def _train(study: Study, wanted: Iterable[Job], known: dict[Job, Run], minutes: float) -> None:
    """One run after the other; none is begun that would end after the minutes, if it takes as long as the last."""
    commit, began, last = _commit(), time.monotonic(), 0.0
    for job in wanted:
        start = time.monotonic()
        if start + last > began + 60 * minutes:
            break
        done = known[job] = (fine_tuning.run if study.then else training.run)(study, job, commit)
        done.write()
        last = time.monotonic() - start
        said = f"{done.metric} {done.quality}, loss {done.loss}" if done.quality is not None else done.error
        name = f"{job.contender} x{job.rate:g} seed {job.seed}"
        print(f"{name:48} {done.outcome}: {said}; {done.processor_seconds:.0f} s of processor", flush=True)


def _tell(wanted: Iterable[Job], known: dict[Job, Run]) -> None:
    left = [*wanted]
    for contender in dict.fromkeys(job.contender for job in left):
        theirs = [job for job in left if job.contender == contender]
        print(f"{contender:48}", *(f"x{job.rate:g}/{job.seed}" for job in theirs))
    usual = median([r.processor_seconds for r in known.values() if r.processor_seconds] or [0.0])
    print(
        f"{len(left)} runs are left, {len(known)} are done; at {usual:.0f} s each, {len(left) * usual / 3600:.1f} hours"
    )


def _commit() -> str:
    words = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "left", "table"))
    parser.add_argument("recipes", nargs="*", help=f"these instead of every preset; {DENSE} is the one to compare with")
    parser.add_argument("--workload", default=tables.MAIN.workload)
    parser.add_argument("--steps", type=int, default=tables.MAIN.steps)
    parser.add_argument("--plan", choices=get_args(Plan), default=tables.MAIN.plan, help="of the learning rate")
    parser.add_argument("--ranks", type=int, default=tables.MAIN.ranks)
    parser.add_argument("--then", choices=("", "lm"), default="", help="train densely on other data afterwards")
    parser.add_argument("--twelve", action="store_true", help="twelve recipes, for workloads whose runs are long")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--rates", type=_numbers(float), help="multiples of the workload's rate: 0.5,1,2")
    parser.add_argument("--seeds", type=_numbers(int), help="0 to 2 to choose by, 40 to 42 to judge by")
    asked = parser.parse_args()
    if asked.then and asked.workload != "wiki-lm":
        parser.error(f"--then {asked.then} is written in the tokens of wiki-lm: add --workload wiki-lm")
    return asked


def _numbers(kind: type[float] | type[int]) -> Callable[[str], list[float]]:
    def read(text: str) -> list[float]:
        return [kind(word) for word in text.split(",")]

    read.__name__ = "list of numbers"
    return read


if __name__ == "__main__":
    main()
