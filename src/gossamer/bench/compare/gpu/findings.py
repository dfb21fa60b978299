"""Findings of a check: one per subject."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from gossamer.fabrics.liveness.heartbeat import ranks as named

Outcome = Literal["passed", "failed", "measured", "left out"]
BADNESS: dict[str, int] = {"failed": 3, "passed": 2, "measured": 1, "left out": 0}


@dataclass(frozen=True)
class Finding:
    """Result of one check on one subject; `says` gives the error, the measurement, or why it was left out."""

    check: str
    subject: str
    outcome: Outcome
    says: str = ""
    numbers: dict[str, Any] = field(default_factory=dict[str, Any])


def merged(by_rank: dict[int, Finding]) -> Finding:
    """Merge the findings of all ranks: the worst outcome, with the texts of the ranks that found it."""
    outcome = max(by_rank.values(), key=lambda f: BADNESS[f.outcome]).outcome
    concerned = {rank: f for rank, f in by_rank.items() if f.outcome == outcome}
    first = next(iter(concerned.values()))
    return Finding(first.check, first.subject, outcome, _in_one(concerned, outcome == "failed"), first.numbers)


def _in_one(concerned: dict[int, Finding], all_of_them: bool) -> str:
    said = dict[str, list[int]]()
    for rank, finding in concerned.items():
        said.setdefault(finding.says, []).append(rank)
    if not all_of_them:
        return next(iter(said))
    return "; ".join(f"{named(ranks)}: {words}" for words, ranks in said.items())


def failures(findings: Iterable[Finding]) -> list[str]:
    """One sentence per failed finding."""
    return [f"{f.check}, {f.subject}: {f.says}" for f in findings if f.outcome == "failed"]
