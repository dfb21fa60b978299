"""Turn the output of ranks into findings: one per rank and subject, also for ranks that died."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from gossamer.bench.compare.events import SubjectBegun, parsed
from gossamer.bench.compare.gpu.check_spec import CheckSpec
from gossamer.bench.compare.gpu.findings import Finding
from gossamer.bench.compare.gpu.launch import Reply
from gossamer.core.text import cut

WORDS = 300  # characters of a process's last line that are shown
Events = list[Any]


class GpuResults(NamedTuple):
    """Results of one launch: findings by subject and rank, and the subjects that are left to try."""

    findings: dict[str, dict[int, Finding]]
    left: tuple[str, ...]


def results_of(spec: CheckSpec, told: Sequence[Reply]) -> GpuResults:
    """Findings up to the first subject that ended a rank: later ones would be tried without that peer."""
    parts = {rank: [parsed(line)[1] for line in told[rank].lines] for rank in spec.ranks}
    events = {rank: [event.what for event in said if event] for rank, said in parts.items()}
    reached = {rank: _last_begun(said) for rank, said in events.items()}
    if None in reached.values():
        return GpuResults(_none(spec, told, [rank for rank, at in reached.items() if at is None]), ())
    last = min(spec.subjects.index(at) for at in reached.values() if at is not None)
    found = {
        subject: {rank: _of(spec, subject, events[rank], told[rank]) for rank in spec.ranks}
        for subject in spec.subjects[: last + 1]
    }
    return GpuResults(found, spec.subjects[last + 1 :])


def _of(spec: CheckSpec, subject: str, events: Events, told: Reply) -> Finding:
    """Finding of one rank on one subject; a failure if its process ended there."""
    ended_here = bool(told.ending) and _last_begun(events) == subject
    if ended_here:
        return Finding(spec.title, subject, "failed", _death(told))
    for event in events:
        if isinstance(event, Finding) and event.subject == subject:
            return event
    return Finding(spec.title, subject, "failed", "its process ended without a message")


def _none(spec: CheckSpec, told: Sequence[Reply], missing: Sequence[int]) -> dict[str, dict[int, Finding]]:
    """Findings of ranks that did not reach the first subject: the others are left out."""
    first, *others = spec.subjects
    failed = {r: Finding(spec.title, first, "failed", _death(told[r])) for r in missing}
    why = "its ranks could not be started, see above"
    return {first: failed} | {s: {missing[0]: Finding(spec.title, s, "left out", why)} for s in others}


def _death(told: Reply) -> str:
    own = [line for line in told.lines if line.strip() and parsed(line)[1] is None]
    said = f": {cut(own[-1].strip(), WORDS)}" if own else ""
    return f"its process {told.ending or 'ended without a message'}{said}"


def _last_begun(events: Events) -> str | None:
    return next((e.subject for e in reversed(events) if isinstance(e, SubjectBegun)), None)
