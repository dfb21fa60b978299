"""Trials in a gang: the ranks' side of a trial without the seconds it takes to start processes."""

import shutil
from pathlib import Path
from typing import Any

from gossamer.bench.compare import ComparePlan
from gossamer.bench.compare.events import RankEvent, facts_of
from gossamer.bench.compare.rank import RankLoop
from gossamer.core.errors import GossamerError

Event = dict[str, Any]


def trial(
    rank: int, size: int, facts: dict[str, Any], mine: dict[int, dict[str, Any]]
) -> tuple[int | str, list[Event]]:
    """Run a plan; `mine` holds what a rank's own plan says differently. The code is the error's text if one came through."""
    events: list[Event] = []

    def hear(event: RankEvent) -> None:
        events.append(facts_of(event))

    try:
        return RankLoop(ComparePlan(**{**facts, **mine.get(rank, {})}), hear).run(), events
    except GossamerError as error:
        return str(error), events


def run(gang: Any, mine: dict[int, dict[str, Any]] | None = None, **facts: Any) -> tuple[int | str, list[Event]]:
    """Rank 0's code and events."""
    return gang.run(trial, {"workload": "ridge", "deadline": 30.0, **facts}, mine or {})[0]


def of(events: list[Event], kind: str, name: str | None = None) -> list[Event]:
    return [e for e in events if e["event"] == kind and name in (None, e.get("run"))]


def steps(events: list[Event], name: str) -> list[tuple[int, float, int]]:
    """What a continuation must repeat: step, loss and bytes."""
    return [(e["step"], e["loss"], e["sent"]) for e in of(events, "step", name)]


def keep_only(folder: Path, step: int) -> None:
    """A folder as it was when the ranks had come to that step."""
    for path in folder.iterdir():
        if not path.name.startswith(f"step{step}-"):
            path.unlink()


def copy(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to
