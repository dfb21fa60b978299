"""Planned beside measured: seconds a step that `gossamer plan` predicts, and those of the lab with an emulated accelerator.

python benchmarks/planner.py [RECIPE ...] [--cells "2:100ms 4:300ms"] [--rates "50mbit 200mbit 1gbit"] [--turns 2]
    [--chunk 12] [--out FILE] [--measured FILE]

A cell is a number of hosts and the seconds of computing, or `real`, where the ranks share the machine's cores: there model and
recipes are timed while as many other processes train as there are other cores in use, as in the lab. Three recipes at a time are
measured in a lab with `ddp`, in turns; what is planned sees the cluster's flags, the model and the processor's work measured
here, and no recipe's step. The null model is bytes over rate, plus the step planned for an unlimited network, less what may
overlap. Bars are those of the issue that asked for the planner; below the lab's own
noise they are open.

Beside them: how long the training loop stood still and how long all threads encoded and decoded, as planned and as rank 0's
ledger says. What a plan calls work and network is what nothing hides, whoever does it. `--measured` plans anew beside what an
earlier run has measured, and kept by --out.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import NoReturn

import torch

import gossamer
from gossamer.bench import workloads
from gossamer.bench.compare import ComparePlan
from gossamer.bench.compare.steps import StepRow, measure_steps
from gossamer.bench.lab import parse_rate
from gossamer.bench.workloads.emulated import emulated
from gossamer.costs import from_flags
from gossamer.planning.baselines import ddp
from gossamer.planning.measured_model import measure
from gossamer.planning.model_cost import ModelCost
from gossamer.planning.plan import Prepared, prepare
from gossamer.planning.replay import StartProgram
from gossamer.planning.work import MeasuredWork

RECIPES = (
    "bf16", "qsgd", "terngrad", "topk", "powersgd(rank=4)", "diana", "local_sgd(8)", "slowmo(8)", "overlap_local_sgd(8)",
    "sgp", "osgp", "allreduce + delayed()",
)  # fmt: skip
REAL = "real"  # computing on the cores of this machine
CORES, LATENCY = 2.0, 50e-6  # of the machine that the lab is on


@dataclass(frozen=True)
class Cell:
    """One recipe on one network: seconds a step."""

    hosts: int
    compute: str
    rate: str
    recipe: str
    planned: float
    null: float
    measured: float
    low: float
    high: float
    planned_ddp: float
    measured_ddp: float
    planned_wait: float
    waited: float
    planned_work: float
    worked: float

    @property
    def error(self) -> float:
        return self.planned / self.measured - 1

    @property
    def null_error(self) -> float:
        return self.null / self.measured - 1

    @property
    def ratio_error(self) -> float:
        return (self.planned / self.planned_ddp) / (self.measured / self.measured_ddp) - 1


def frozen() -> str:
    """A hash of the code that plans, kept with each result: nothing was changed after looking."""
    digest = hashlib.blake2b(digest_size=8)
    for room in ("planning", "costs"):
        for path in sorted((Path(gossamer.__file__).parent / room).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def cost_of(workload: workloads.Workload, compute: str) -> ModelCost:
    """The model's cost: on the emulated accelerator waits as told, and the optimizer as measured here; else all as measured."""
    model = workload.model()
    optimizer = workload.optimizer(model)
    here = measure(model, optimizer, lambda step: workload.loss(model, workload.batch(step, 0, 1)), name=workload.name)
    if compute == REAL:
        return here
    order = emulated(workload, compute).order  # pyright: ignore[reportAttributeAccessIssue]
    seconds = emulated(workload, compute).compute.mean  # pyright: ignore[reportAttributeAccessIssue]
    return ModelCost(
        shapes=here.shapes,
        forward=order.forward * seconds,
        backward=(1 - order.forward) * seconds,
        optimizer=here.optimizer,
        shares={arrival.name: arrival.share for arrival in order.arrivals},
        momenta=here.momenta,
        on_cores=False,
        name=workload.name,
        source="emulated",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--workload", default="lm")
    parser.add_argument("--cells", default="2:100ms 4:300ms")
    parser.add_argument("--rates", default="50mbit 200mbit 1gbit")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=12)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--measured", type=Path, help="an earlier run's --out: plan these cells anew, and measure nothing"
    )
    parser.add_argument("--train", action="store_true", help="train without end; set by the program itself")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    workload = workloads.get(asked.workload)
    workload.prepare()
    if asked.train:
        train(workload)
    print(f"plans made by code {frozen()}")
    cells, earlier = list[Cell](), earlier_rows(asked.measured) if asked.measured else None
    alone, beside_others = MeasuredWork(), MeasuredWork()
    for text in asked.cells.split():
        hosts, _, compute = text.partition(":")
        others, work = (int(min(int(hosts), CORES)) - 1, beside_others) if compute == REAL else (0, alone)
        with others_computing(asked.workload, others):
            model = cost_of(workload, compute)
            plans = [Planned(asked.recipes, model, int(hosts), rate, work) for rate in asked.rates.split()]
        for planned in plans:
            for first in range(0, len(asked.recipes), 3):
                some = asked.recipes[first : first + 3]
                if earlier is None:
                    rows = steps_of(some, planned.hosts, planned.rate, compute, asked)
                else:
                    rows = earlier[planned.hosts, compute, planned.rate]
                cells += told(some, planned, compute, {row.recipe: row for row in rows})
                if asked.out:
                    asked.out.write_text(json.dumps([vars(cell) for cell in cells], indent=1))
    verdicts([cell for cell in cells if cell.compute != REAL])
    verdicts_of_real_computing([cell for cell in cells if cell.compute == REAL])


class Planned:
    """The recipes' plans on one network, before anything is measured there."""

    def __init__(self, recipes: list[str], model: ModelCost, hosts: int, rate: str, work: MeasuredWork) -> None:
        bits = parse_rate(rate)
        assert bits is not None
        self.hosts, self.rate = hosts, rate
        self.cluster = from_flags(nodes=hosts, rate=bits / 8, latency=LATENCY, cores=CORES / hosts)
        self.ddp = ddp(model, hosts).seconds(self.cluster).step
        self.plans = {name: prepare(name, model, self.cluster, work) for name in recipes}


def told(recipes: list[str], planned: Planned, compute: str, rows: dict[str, StepRow]) -> list[Cell]:
    """The cells of some recipes that were measured beside DDP."""
    out, measured_ddp = list[Cell](), rows["ddp"].step_ms
    for name in recipes:
        plan, row = planned.plans[name], rows[name]
        found = plan.seconds(planned.cluster)
        cell = Cell(
            planned.hosts, compute, planned.rate, name, found.step, plan.null_seconds(planned.cluster), row.step_ms / 1e3,
            row.low_ms / 1e3, row.high_ms / 1e3, planned.ddp, measured_ddp / 1e3,
            found.work + found.network, (row.waited_ms or 0.0) / 1e3, work_of_a_step(plan), (row.coded_ms or 0.0) / 1e3,
        )  # fmt: skip
        print(
            f"{cell.hosts} hosts, {compute}, {cell.rate:8s} {name:22s} planned {1e3 * cell.planned:7.0f} ms, measured "
            f"{row.step_ms:7.0f} ({row.low_ms:.0f} to {row.high_ms:.0f}): {cell.error:+.1%}, of DDP {cell.ratio_error:+.1%}, "
            f"null {cell.null_error:+.1%}; "
            f"waits {1e3 * cell.planned_wait:.0f}, {1e3 * cell.waited:.0f}; works {1e3 * cell.planned_work:.0f}, {1e3 * cell.worked:.0f}",
            flush=True,
        )
        out.append(cell)
    print(f"    ddp planned {1e3 * planned.ddp:.0f} ms, measured {measured_ddp:.0f}", flush=True)
    return out


def earlier_rows(path: Path) -> dict[tuple[int, str, str], list[StepRow]]:
    """What an earlier run measured on each network; DDP's is that of the first lab of three recipes."""
    out = dict[tuple[int, str, str], list[StepRow]]()
    for cell in (Cell(**each) for each in json.loads(path.read_text())):
        rows = out.setdefault((cell.hosts, cell.compute, cell.rate), [])
        if not rows:
            rows.append(_row("ddp", cell, cell.measured_ddp, 0.0, 0.0))
        rows.append(_row(cell.recipe, cell, cell.measured, cell.waited, cell.worked))
    return out


def _row(recipe: str, cell: Cell, seconds: float, waited: float, worked: float) -> StepRow:
    low, high = (cell.low, cell.high) if recipe == cell.recipe else (seconds, seconds)
    return StepRow(
        recipe, cell.rate, cell.hosts, 1e3 * seconds, 1e3 * low, 1e3 * high, None, None, None, None, None,
        waited_ms=1e3 * waited, coded_ms=1e3 * worked,
    )  # fmt: skip


@contextmanager
def others_computing(workload: str, count: int) -> Generator[None]:
    """So many other processes train as long as this lasts, as ranks on the machine's other cores do."""
    started = [
        subprocess.Popen([sys.executable, __file__, "--train", "--workload", workload], stdout=subprocess.PIPE)
        for _ in range(count)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()  # its first step is over
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


def train(workload: workloads.Workload) -> NoReturn:
    """Train without end; a line says that the first step is over."""
    model = workload.model()
    optimizer = workload.optimizer(model)
    step = 0
    while True:
        optimizer.zero_grad()
        workload.loss(model, workload.batch(step, 0, 1)).backward()
        optimizer.step()
        if step == 0:
            print("trains", flush=True)
        step += 1


def work_of_a_step(plan: Prepared) -> float:
    """Seconds in which a rank encodes and decodes, hidden or not."""
    steps = plan.steps[plan.warm :]
    pieces = [p for step in steps for action in step if isinstance(action, StartProgram) for p in action.pieces]
    return sum(piece.work + piece.inside for piece in pieces) / len(steps)


def steps_of(recipes: list[str], hosts: int, rate: str, compute: str, asked: argparse.Namespace) -> list[StepRow]:
    contenders = {name: name for name in ("ddp", *recipes)}
    plan = ComparePlan(contenders, asked.workload, chunk=asked.chunk, compute="" if compute == REAL else compute)
    return measure_steps(plan, asked.turns, rate, hosts, lambda event: None)


def verdicts(cells: list[Cell]) -> None:
    """Each bar, what was found, and whether it is met."""
    errors = sorted(abs(cell.error) for cell in cells)
    if not errors:
        return
    ratios = sorted(abs(cell.ratio_error) for cell in cells)
    print(f"\n{len(cells)} cells; half of the range of a cell's own steps is {noise_of(cells):.1%} of a step (median)")
    bar("median error of a step", statistics.median(errors), 0.06)
    bar("nine in ten", errors[min(int(0.9 * len(errors)), len(errors) - 1)], 0.12)
    bar("worst", errors[-1], 0.25)
    bar("median error of the ratio to DDP", statistics.median(ratios), 0.05)
    bar_of_pairs(cells, 0.98)
    waiting = [(cell.planned_wait, cell.waited) for cell in cells]
    working = [(cell.planned_work, cell.worked) for cell in cells]
    for what, some in (("waiting", waiting), ("encoding and decoding", working)):
        near = sum(abs(a - b) <= max(0.2 * b, 0.01) for a, b in some)
        print(f"  {what} within 20 % or 10 ms: {near} of {len(some)}")
    for rate in dict.fromkeys(cell.rate for cell in cells):
        ours = statistics.median(abs(c.error) for c in cells if c.rate == rate)
        null = statistics.median(abs(c.null_error) for c in cells if c.rate == rate)
        print(f"  {rate}: median error {ours:.1%}, of the null model {null:.1%}: {word(ours < null)}")


def verdicts_of_real_computing(cells: list[Cell]) -> None:
    """Four ranks on two cores measure the processor: a bar is never below 1.5 times the noise measured beside it."""
    if not cells:
        return
    print(f"\n{len(cells)} cells of real computing")
    for rate in dict.fromkeys(cell.rate for cell in cells):
        some = [cell for cell in cells if cell.rate == rate]
        noise = noise_of(some)
        bits = parse_rate(rate)
        stated = 0.08 if bits is not None and bits <= 2e8 else 0.12
        print(f"  {rate}: {len(some)} cells, noise {noise:.1%}")
        bar("median error of a step", statistics.median(abs(cell.error) for cell in some), max(stated, 1.5 * noise))
        bar(
            "median error of the ratio to DDP",
            statistics.median(abs(cell.ratio_error) for cell in some),
            max(stated, 1.5 * noise),
        )
    bar_of_pairs(cells, 0.95)


def noise_of(cells: list[Cell]) -> float:
    """Half of the range of a cell's own steps, as a share of a step: the median."""
    return statistics.median((cell.high - cell.low) / cell.measured / 2 for cell in cells)


def bar_of_pairs(cells: list[Cell], least: float) -> None:
    ordered, pairs = order(cells)
    if pairs:
        share = ordered / pairs
        print(
            f"  pairs that differ by over 10 %, in order: {share:.1%} of {pairs} ({least:.0%}): {word(share >= least)}"
        )


def bar(what: str, found: float, most: float) -> None:
    print(f"  {what}: {found:.1%} ({most:.0%}): {word(found <= most)}")


def word(met: bool) -> str:
    return "met" if met else "not met"


def order(cells: list[Cell]) -> tuple[int, int]:
    """Pairs of recipes on one network that differ by over 10 %, and how many of them are planned in their order."""
    right = pairs = 0
    for a, b in combinations(cells, 2):
        if (a.hosts, a.compute, a.rate) != (b.hosts, b.compute, b.rate) or abs(a.measured / b.measured - 1) <= 0.1:
            continue
        pairs += 1
        right += (a.planned < b.planned) == (a.measured < b.measured)
    return right, pairs


if __name__ == "__main__":
    sys.exit(main())
