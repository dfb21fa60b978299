"""What a run leaves behind: one JSON file that `compare` writes and `report` reads."""

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

FORMAT = 2

Status = Literal["ok", "failed", "interrupted"]


@dataclass
class Step:
    """One optimizer step, as rank 0 saw it. Seconds and bytes count from the run's start, the three parts are of this step.

    None is "not measured", never 0: torch's DDP does not say how long it waits.
    """

    step: int
    seconds: float
    loss: float
    sent: int | None  # bytes over this rank's link, by the ledger or a formula
    compute: float | None = None  # seconds of forward, backward, optimizer
    codec: float | None = None  # seconds of encoding and decoding, on whichever thread
    wait: float | None = None  # seconds for which the training loop stood still for the network


@dataclass
class Evaluation:
    """Quality on held-out data."""

    step: int
    seconds: float
    sent: int | None
    quality: float


@dataclass
class Run:
    """One recipe's run."""

    name: str
    recipe: str
    status: Status = "ok"
    error: str = ""  # why it failed, or what interrupted it
    about: str = ""  # what the recipe does, in a sentence
    yardstick: bool = False  # trained without gossamer
    steps: list[Step] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    layer_errors: dict[str, float] = field(default_factory=dict)  # relative compression error, by parameter
    residuals: list[tuple[int, float]] = field(default_factory=list)  # (step, norm of what is still owed)
    decisions: list[tuple[int, str]] = field(default_factory=list)  # (step, what a controller decided)
    # Means over ranks, known at the end of a run. None where it was cut off, or where there is nothing to count with.
    logical_bytes: int | None = None  # handed to the backend
    wire_bytes: int | None = None  # crossing one rank's link, by the ledger or a formula
    nic_bytes: int | None = None  # the interface's counter over the same time; None outside a lab, too

    @property
    def alone(self) -> bool:
        """Trains without a network: a floor for the step time, and no way to train together."""
        return self.yardstick and self.recipe == "compute"

    @property
    def sent(self) -> int | None:
        """Bytes over one rank's link: of a run that was cut off, what rank 0 had sent by then."""
        return self.wire_bytes if self.wire_bytes is not None or not self.steps else self.steps[-1].sent

    def arrival(self, target: float, lower_is_better: bool) -> Evaluation | None:
        """The first evaluation that is at a target, or beyond."""
        there = (e for e in self.evaluations if (e.quality <= target if lower_is_better else e.quality >= target))
        return next(there, None)


@dataclass
class Record:
    """Several runs of one workload on one network, side by side."""

    command: str
    created: str  # ISO 8601, UTC
    workload: str
    summary: str
    metric: str
    lower_is_better: bool
    parameters: int
    hosts: int
    rate: str  # "200mbit", or "unshaped"
    seed: int
    versions: dict[str, str] = field(default_factory=dict)
    machine: str = ""
    note: str = ""  # for instance why a network could not be shaped
    baseline: str = "ddp"  # the run that the others are compared with
    runs: list[Run] = field(default_factory=list)
    format: int = FORMAT

    def run(self, name: str) -> Run | None:
        return next((r for r in self.runs if r.name == name), None)

    def target(self) -> float | None:
        """The held-out quality that the baseline ended with. None if it learned nothing: then all would start beyond it."""
        base = self.run(self.baseline)
        judged = [e for e in base.evaluations if math.isfinite(e.quality)] if base else []
        if base is None or not judged or judged[-1] is not base.evaluations[-1] or not judged[-1].step:
            return None
        last = judged[-1].quality
        before = [e.quality for e in judged if e.step == 0]
        learned = all(last < q if self.lower_is_better else last > q for q in before)
        return last if learned else None

    def write(self, path: Path) -> None:
        """Write, then rename: a full disk leaves the old file as it was."""
        half = path.with_name(path.name + ".part")
        try:
            half.write_text(json.dumps(_finite(asdict(self)), allow_nan=False))
            os.replace(half, path)
        except BaseException:
            half.unlink(missing_ok=True)
            raise

    @staticmethod
    def read(path: Path) -> "Record":
        return _record(json.loads(path.read_text()))


def _finite(value: Any) -> Any:
    """JSON knows neither infinity nor NaN: a loss that ran away is null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _with_number(table: dict[str, Any], name: str) -> dict[str, Any]:
    return {**table, name: _number(table[name])}


def _record(table: dict[str, Any]) -> Record:
    if not isinstance(table, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError("there is no table in it")
    if table.get("format") != FORMAT:
        raise ValueError(
            f"it has format {table.get('format')!r}, and this version of gossamer reads format {FORMAT}; "
            "run its command again, or read it with the version that wrote it"
        )
    facts: dict[str, Any] = {**table, "runs": [_run(r) for r in table["runs"]]}
    return Record(**facts)


def _run(table: dict[str, Any]) -> Run:
    facts: dict[str, Any] = {
        **table,
        "steps": [Step(**_with_number(s, "loss")) for s in table["steps"]],
        "evaluations": [Evaluation(**_with_number(e, "quality")) for e in table["evaluations"]],
        "residuals": [(int(s), _number(v)) for s, v in table["residuals"]],
        "layer_errors": {k: _number(v) for k, v in table.get("layer_errors", {}).items()},
        "decisions": [(int(s), str(v)) for s, v in table["decisions"]],
    }
    return Run(**facts)
