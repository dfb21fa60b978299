"""A finished run of `benchmarks/to_the_end.py`: one JSON file each, from which all tables are made."""

import json
import math
import os
import re
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "quality" / "end"
DENSE = "allreduce"
JUDGED, TUNING = (40, 41, 42), (0, 1, 2)  # seeds of the tables, and seeds on which anything may be chosen

Outcome = Literal["ended", "diverged", "refused"]
Plan = Literal["linear", "cuts"]


class Job(NamedTuple):
    """One run of a study: a recipe, a multiple of the workload's learning rate, and the seed of data, model and all dice."""

    contender: str
    rate: float
    seed: int


@dataclass(frozen=True)
class Study:
    """What all runs of a table have in common."""

    workload: str
    steps: int
    plan: Plan = "linear"
    ranks: int = 4
    then: str = ""  # a workload on which dense training goes on from the model of this one, or none

    @property
    def name(self) -> str:
        return f"{self.workload}-{self.steps}-{self.plan}" + (f"-then-{self.then}" if self.then else "")

    def factor(self, step: int) -> float:
        """Of the learning rate at a step, from 1: constant, then in a straight line to zero, or cut tenfold twice.

        >>> linear = Study("fashion", 100)
        >>> [linear.factor(step) for step in (1, 50, 51, 100)]
        [1.0, 1.0, 1.0, 0.02]
        >>> [Study("lm", 100, "cuts").factor(step) for step in (50, 51, 75, 76)]
        [1.0, 0.1, 0.1, 0.01]
        """
        half = self.steps // 2
        if self.plan == "cuts":
            return (1.0, 0.1, 0.01)[(step > half) + (step > half + half // 2)]
        return min(1.0, (self.steps - step + 1) / (self.steps - half))


@dataclass(frozen=True)
class Run:
    """How a run ended. A number is None where there is none: it diverged, or the recipe was refused."""

    study: Study
    job: Job
    recipe: str  # written out
    outcome: Outcome
    metric: str
    lower_is_better: bool
    held: int  # samples that the metric is a mean of
    quality: float | None = None  # of the consensus, on held-out data
    loss: float | None = None  # the same, of what training makes small
    curve: tuple[
        tuple[int, float], ...
    ] = ()  # training loss, the mean over ranks and over the steps since the last point
    sent: int = 0  # bytes of one rank in all, the mean over ranks
    steps: int = 0  # optimizer steps: fewer than the study's where one step takes several micro-batches
    processor_seconds: float = 0.0
    commit: str = ""
    error: str = ""

    def write(self, folder: Path = FOLDER) -> Path:
        """Write the record in one step, so that a run that is killed leaves no half of one."""
        path = path_of(self.study, self.job, folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=".part-")
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps(asdict(self) | {"job": self.job._asdict()}, allow_nan=False) + "\n")
        Path(part).chmod(0o644)
        Path(part).replace(path)
        return path


def path_of(study: Study, job: Job, folder: Path = FOLDER) -> Path:
    """Where a run's record is.

    >>> path_of(Study("fashion", 2500), Job("terngrad(last='qsgd')", 0.5, 40), Path("end")).as_posix()
    'end/fashion-2500-linear/terngrad-last-qsgd-x0.5-seed40.json'
    """
    slug = re.sub(r"[^\w.]+", "-", job.contender).strip("-")
    return folder / study.name / f"{slug}-x{job.rate:g}-seed{job.seed}.json"


def read(path: Path) -> Run:
    found = json.loads(path.read_text())
    missing = {f.name for f in fields(Run)} ^ found.keys()
    if missing:
        raise ValueError(f"{path} is no record of a run to the end: {', '.join(sorted(missing))} missing or unknown")
    job, curve = Job(**found.pop("job")), tuple((int(step), float(loss)) for step, loss in found.pop("curve"))
    return Run(study=Study(**found.pop("study")), job=job, curve=curve, **found)


def read_all(folder: Path = FOLDER) -> list[Run]:
    """All finished runs."""
    return [read(path) for path in sorted(folder.glob("*/*.json"))]


def thinned(losses: list[float], points: int = 50) -> tuple[tuple[int, float], ...]:
    """Means over equal windows, each with its last step.

    >>> thinned([4.0, 2.0, 1.0, 1.0], points=2)
    ((2, 3.0), (4, 1.0))
    """
    width = math.ceil(len(losses) / points) if losses else 1
    windows = [(i + 1, losses[i : i + width]) for i in range(0, len(losses), width)]
    return tuple((first + len(window) - 1, _short(sum(window) / len(window))) for first, window in windows)


def _short(value: float) -> float:
    return float(f"{value:.5g}")
