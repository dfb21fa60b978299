"""What a run leaves behind: one JSON file that `compare` writes and `report` reads."""

import json
import math
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch

import gossamer
from gossamer.core import files
from gossamer.core.text import cut, shown

FORMAT = 2
LARGEST = 1_000_000_000  # bytes; a million steps of one run take a sixth of it
AUTHOR = {"written by": "gossamer"}  # comes first
MARKS = (b'{"written by": "gossamer"', b'{"command": "gossamer ')  # the second until 0.1
RECORD = files.FileKind("record of a run", MARKS)

Status = Literal["ok", "failed", "interrupted"]
T = TypeVar("T")


@dataclass
class Step:
    """One optimizer step, as rank 0 saw it. Seconds and bytes count from the run's start, the three parts are of this step.

    None is "not measured", never 0: torch's DDP does not say how long it waits.
    """

    step: int
    seconds: float
    loss: float
    sent: int | None  # bytes over its host's link, by the ledger or a formula; None where other ranks share that
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
    # What values that are not finite (NaN, infinity) have cost all ranks; and how often each rank was the cause, by number.
    skipped_steps: int = 0
    dropped_rounds: int = 0
    spoilt: dict[str, int] = field(default_factory=dict)
    # How many steps old models were when they landed on rank 0, and how often, by number; where that is a matter of time.
    staleness: dict[str, int] = field(default_factory=dict)
    # Means over ranks, known at the end of a run. None where it was cut off, or where there is nothing to count with.
    logical_bytes: int | None = None  # handed to the backend
    wire_bytes: int | None = None  # crossing one host's link, by the ledger or a formula
    nic_bytes: int | None = None  # the interface's counter over the same time; None outside a lab, too
    inside_bytes: int | None = None  # what the ranks of one host told each other past its link; 0 where it has one rank
    lr: float = 1.0  # in multiples of the workload's own learning rate
    # While it trained: seconds of a processor that a rank used per step, and cores of its machine that anybody kept busy.
    processor: float | None = None
    busy_cores: float | None = None
    # Of emulated computing: the part of `processor` while it lasted, and by how many seconds a step it ended late.
    beside: float | None = None
    late: float | None = None

    @property
    def alone(self) -> bool:
        """Trains without a network: a floor for the step time, and no way to train together."""
        return self.yardstick and self.recipe == "compute"

    @property
    def done(self) -> int:
        """The last step: there may be fewer rows than steps, for backup workers skip those they were late for."""
        return self.steps[-1].step if self.steps else 0

    @property
    def sent(self) -> int | None:
        """Bytes over one host's link: of a run that was cut off, what rank 0 had sent by then."""
        if self.wire_bytes is not None or not self.steps:
            return self.wire_bytes
        # What was still on its way at a step has arrived when its model is judged.
        seen = [last.sent for last in (self.steps[-1], *self.evaluations[-1:]) if last.sent is not None]
        return max(seen, default=None)


@dataclass
class RepeatedRuns:
    """The same runs with another seed: other data order, other first model, other dice."""

    seed: int
    runs: list[Run] = field(default_factory=list)


def named(runs: Sequence[Run], name: str) -> Run | None:
    return next((r for r in runs if r.name == name), None)


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
    again: list[RepeatedRuns] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)  # modules and files whose parts these recipes have
    format: int = FORMAT
    per_host: int = 1  # ranks on each host
    script: str = ""  # whose own training this was; else a workload's
    together: int = 1  # records that were put on one page
    compute: str = ""  # how long an emulated accelerator computed; losses mean nothing then
    timing: bool = False  # steps were compared, not quality

    def run(self, name: str) -> Run | None:
        return named(self.runs, name)

    @property
    def trials(self) -> dict[int, list[Run]]:
        """The runs of every seed; of those after the first, the ones that nobody interrupted."""
        whole = {a.seed: a.runs for a in self.again if all(r.status != "interrupted" for r in a.runs)}
        return {self.seed: self.runs, **whole}

    def with_again(self, other: "Record") -> "Record":
        """The same, and what another seed made of it. Why a run failed there is a note: tables have the first seed's."""
        failed = [r for r in other.runs if r.status == "failed"]
        why = [f"with seed {other.seed} {r.name} failed: {r.error.partition(chr(10))[0]}" for r in failed]
        notes = dict.fromkeys(n for n in (self.note, other.note, *why) if n)
        return replace(self, note="; ".join(notes), again=[*self.again, RepeatedRuns(other.seed, other.runs)])

    @property
    def has_begun(self) -> bool:
        """Something has been learned that could be lost."""
        return any(run.steps for run in self.runs)

    def target(self, runs: Sequence[Run] | None = None) -> float | None:
        """The held-out quality that the baseline ended with. None if it learned nothing: then all would start beyond it."""
        if self.timing:
            return None
        base = named(self.runs if runs is None else runs, self.baseline)
        judged = [e for e in base.evaluations if math.isfinite(e.quality)] if base else []
        if base is None or not judged or judged[-1] is not base.evaluations[-1] or not judged[-1].step:
            return None
        first, last = judged[0].quality, judged[-1].quality  # scripts judge when they like; means of training are noisy
        unknown = judged[0] is judged[-1] or (judged[0].step and "training" in self.metric)
        learned = unknown or (last < first if self.lower_is_better else last > first)
        return last if learned else None

    def write(self, path: Path) -> None:
        """Over nothing but an earlier record. A full disk leaves that as it was, and so does a power cut."""
        files.write(path, json.dumps(AUTHOR | finite(self), allow_nan=False), RECORD)

    @staticmethod
    def read(path: Path) -> "Record":
        """A ValueError says, in words about the file, why it holds no record."""
        return read(path, _record)


def read(path: Path, make: Callable[[Any], T]) -> T:
    """What `make` makes of a file of JSON. A ValueError says, in words about the file, why it cannot."""
    try:
        text = files.read(path, LARGEST)
        return make(json.loads(text, parse_constant=_no_number, parse_int=_whole))
    except json.JSONDecodeError as error:
        why = f"it is not JSON, or was cut off at line {error.lineno}, column {error.colno}"
        raise ValueError(why if error.doc else "it is empty") from None
    except UnicodeDecodeError:
        raise ValueError("it is not text") from None
    except KeyError as error:
        raise ValueError(f"it has no {error}") from None
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"what is in it is not what a run writes ({cut(str(error))})") from None


def finite(value: Any) -> Any:
    """JSON knows neither infinity nor NaN: a loss that ran away is null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if isinstance(value, Record | Run | Step | Evaluation | RepeatedRuns):
        value = vars(value)
    return {k: finite(v) for k, v in value.items()} if isinstance(value, dict) else value


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


def _whole(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError(f"a number in it has {len(digits)} digits")
    return int(digits)


def number(value: float | None) -> float:
    return math.nan if value is None else value


def _with_number(table: dict[str, Any], name: str) -> dict[str, Any]:
    return {**table, name: number(table[name])}


def _record(table: dict[str, Any]) -> Record:
    if not isinstance(table, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError("there is no table in it")
    if table.get("format") != FORMAT:
        raise ValueError(
            f"it has format {shown(table.get('format'))}, and this version of gossamer reads format {FORMAT}; "
            "run its command again, or read it with the version that wrote it"
        )
    facts = {name: value for name, value in table.items() if name not in AUTHOR}
    again = [made(RepeatedRuns, {**a, "runs": [_run(r) for r in a["runs"]]}) for a in table.get("again", [])]
    return made(Record, {**facts, "runs": [_run(r) for r in table["runs"]], "again": again})


def _run(table: dict[str, Any]) -> Run:
    facts: dict[str, Any] = {
        **table,
        "steps": [made(Step, _with_number(s, "loss")) for s in table["steps"]],
        "evaluations": [made(Evaluation, _with_number(e, "quality")) for e in table["evaluations"]],
        "residuals": [(s, number(v)) for s, v in table["residuals"]],
        "layer_errors": {k: number(v) for k, v in table.get("layer_errors", {}).items()},
        "decisions": [(s, v) for s, v in table["decisions"]],
    }
    return made(Run, facts)


_hints = cache(get_type_hints)


def made(kind: type[T], facts: dict[str, Any]) -> T:
    """A dataclass from what a file says, if every value is of the field's type."""
    built = kind(**facts)
    for name, hint in _hints(kind).items():
        value = getattr(built, name)
        if not _fits(value, hint):
            raise TypeError(f"{name} of a {kind.__name__.lower()} is {str(value)[:40]!r}")
    return built


def _fits(value: Any, hint: Any) -> bool:
    """Whether JSON's value is what an annotation says; a whole number is welcome where a float is asked for."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Any:
        return True
    if kind is UnionType:
        return any(_fits(value, h) for h in inner)
    if kind is Literal:
        return value in inner
    if kind is float:
        return type(value) in (int, float) and not math.isinf(value)
    if kind is int:
        return type(value) is int
    if kind is list:
        return isinstance(value, list) and all(_fits(v, inner[0]) for v in value)
    if kind is dict:
        return isinstance(value, dict) and all(_fits(v, inner[1]) for v in value.values())
    if kind is tuple:
        return len(value) == len(inner) and all(_fits(v, h) for v, h in zip(value, inner, strict=True))
    return isinstance(value, kind)


# -- where it ran -----------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Of what runs train with."""
    found = {"gossamer": gossamer.__version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in ("numba", "triton", "decent-dp"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()} {platform.release()}{_tcp()}"


def _tcp() -> str:
    """The kernel's TCP congestion control, which moves step times on slow links by several percent."""
    with suppress(OSError):
        return f", TCP {Path('/proc/sys/net/ipv4/tcp_congestion_control').read_text().strip()}"
    return ""
