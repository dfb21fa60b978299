"""What the ranks of a comparison tell its launcher: one class for each kind of event, one line of JSON for each event.

Ranks of a workload, of a script and of a check of GPUs write the same lines. `gossamer compare --json` prints them.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from gossamer.bench.compare.gpu.findings import Finding
from gossamer.bench.record import Evaluation, Step, made

MARK = "@gossamer "  # lines of a rank with this mark are events, all others are plain output


@dataclass
class Note:
    """A sentence for whoever watches."""

    text: str


@dataclass
class Started:
    """All ranks have met."""

    size: int
    in_lab: bool


@dataclass
class Entered:
    """A run is ready to train, or to go on after `done` steps."""

    recipe: str
    done: int


@dataclass
class History:
    """Events of a resumed run from before its checkpoint, as pairs of kind and facts."""

    events: list[Any]


@dataclass
class ShownEvaluation(Evaluation):
    """An evaluation of a script, and what it is of."""

    of: str


@dataclass
class UnloggedStep(Step):
    """A step of a script that has logged no loss yet; its loss is what backward() was called on."""


@dataclass
class ResidualNorm:
    """Norm of what a rank still owes after a step."""

    step: int
    norm: float


@dataclass
class RecipeChange:
    """What a controller decided after a step."""

    step: int
    text: str


@dataclass
class SpoiltCounts:
    """Steps and rounds lost to values that are not finite, and how often each rank was the cause, by number."""

    skipped_steps: int
    dropped_rounds: int
    by: dict[str, int]


@dataclass
class ModelAges:
    """How often models arrived at each age in steps, by number."""

    ages: dict[str, int]


@dataclass
class CompressionErrors:
    """Relative compression errors by parameter."""

    errors: dict[str, float]


@dataclass
class Failed:
    """A run has ended with an error."""

    error: str


@dataclass
class Ended:
    """A run has had all its steps; the meaning of the totals is that of the record's."""

    wire_bytes: int | None
    inside_bytes: int | None
    logical_bytes: int | None
    nic_bytes: int | None
    processor: float | None = None
    busy_cores: float | None = None
    beside: float | None = None
    late: float | None = None


@dataclass
class ScriptEnded(Ended):
    """A script has had all its steps."""

    compiled: bool = False  # it used torch.compile


@dataclass
class Broken:
    """Rank 0 cannot go on with any run."""

    error: str


@dataclass
class AllDone:
    """Every run has ended."""


@dataclass
class FilesWritten:
    """Record and report are written; `code` is the exit code."""

    code: int
    record: str
    report: str


@dataclass
class ScriptAttached:
    """A script has attached its model."""

    recipe: str
    parameters: int


@dataclass
class ScriptRefused:
    """A script cannot be compared."""

    error: str


@dataclass
class ScriptDied:
    """A script has raised an error; `missed` if it waited for another rank, whose own error says more."""

    error: str
    missed: bool


@dataclass
class SubjectBegun:
    """A check begins with a subject."""

    subject: str


KINDS: dict[str, type[Any]] = {
    "note": Note,
    "begin": Started,
    "contender": Entered,
    "history": History,
    "step": Step,
    "evaluation": Evaluation,
    "heard": UnloggedStep,
    "residual": ResidualNorm,
    "decision": RecipeChange,
    "spoilt": SpoiltCounts,
    "staleness": ModelAges,
    "layers": CompressionErrors,
    "failed": Failed,
    "end": Ended,
    "script end": ScriptEnded,
    "broken": Broken,
    "done": AllDone,
    "written": FilesWritten,
    "attached": ScriptAttached,
    "refused": ScriptRefused,
    "died": ScriptDied,
    "subject": SubjectBegun,
    "finding": Finding,
}
NAMES: dict[type[Any], str] = {kind: name for name, kind in KINDS.items()} | {ShownEvaluation: "evaluation"}


class RankEvent(NamedTuple):
    """An event, and the name of the run that it belongs to; empty if it belongs to none."""

    what: Any
    run: str = ""


OnEvent = Callable[[RankEvent], None]


def facts_of(event: RankEvent) -> dict[str, Any]:
    """The plain form of an event.

    >>> facts_of(RankEvent(ResidualNorm(3, 0.5), "topk"))
    {'event': 'residual', 'run': 'topk', 'step': 3, 'norm': 0.5}
    """
    run = {"run": event.run} if event.run else {}
    return {"event": NAMES[type(event.what)], **run, **vars(event.what)}


def event_of(facts: dict[str, Any]) -> RankEvent:
    """The event of a plain form; raises a ValueError, KeyError or TypeError if it is none.

    >>> event_of({"event": "residual", "run": "topk", "step": 3, "norm": 0.5})
    RankEvent(what=ResidualNorm(step=3, norm=0.5), run='topk')
    """
    rest = dict(facts)
    name, run = rest.pop("event"), rest.pop("run", "")
    if not isinstance(run, str):
        raise TypeError(f"the run of an event is {run!r}")
    return RankEvent(what_of(name, rest), run)


def what_of(name: str, facts: dict[str, Any]) -> Any:
    """The payload of an event from its kind's name and its fields."""
    return made(KINDS[name], facts)


def parsed(line: str) -> tuple[str, RankEvent | None]:
    """Split a rank's line into plain output and an event; what was cut short, or is no event of ours, is plain output."""
    said, mark, rest = line.partition(MARK)  # the line of another rank may be unfinished
    if not mark:
        return line, None
    try:
        # JSON knows no infinity, and neither does the record: a value that ran away is not a number.
        return said, event_of(json.loads(rest, parse_constant=lambda word: float("nan")))
    except (ValueError, KeyError, TypeError, AttributeError):
        return line, None


def tell(event: RankEvent) -> None:
    """Print one event as one line in one write, so that lines of several threads do not mix and a launcher has it at once."""
    sys.stdout.write(line_of(event))
    sys.stdout.flush()


def line_of(event: RankEvent) -> str:
    return MARK + json.dumps(facts_of(event)) + "\n"
