"""What a claim leaves behind: one JSON file with all runs, their settings and versions, and the verdicts as found."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gossamer.bench import record
from gossamer.bench.claims.evidence import ClaimFigure, ClaimRun, Line
from gossamer.bench.claims.verdict import ORDER, Verdict
from gossamer.core import files

KIND = "claim"
FORMAT = 1


@dataclass
class JudgedStatement:
    """A statement, what was expected of it, and what was found."""

    key: str
    says: str
    rule: str
    expected: Verdict
    verdict: Verdict = "waiting"
    found: str = ""
    effect: list[float] = field(default_factory=list[float])  # mean, lower and upper bound, where it has one
    unit: str = ""
    plan: str = ""  # the hash of the plan by which it was judged, where the claim has grown since
    commit: str = ""  # at which it was judged, where that is not the record's


@dataclass
class EarlierVerdicts:
    """What an earlier version of the plan found. It stays."""

    plan: str
    commit: str
    created: str
    verdicts: dict[str, str]
    found: dict[str, str]


@dataclass
class ClaimRecord:
    """Everything that is known of one claim; its page is made from this alone."""

    claim: str
    paper: str
    setup: list[str]
    limits: str
    plan: str  # the hash of all settings and rules
    settings: dict[str, Any]  # the plan itself
    commit: str
    created: str  # ISO 8601, UTC
    versions: dict[str, str]
    machine: str
    sources: dict[str, str]  # by module, the fingerprint of its code
    statements: list[JudgedStatement]
    seeds: list[int]
    figures: list[ClaimFigure] = field(default_factory=list[ClaimFigure])
    runs: list[ClaimRun] = field(default_factory=list[ClaimRun])
    earlier: list[EarlierVerdicts] = field(default_factory=list[EarlierVerdicts])
    done: bool = False  # all runs are there, and the verdicts are given
    wall: float = 0.0  # seconds by the clock, of all sittings together
    confirmed: str = ""  # the commit at which the first seed's runs came out the same again
    kind: str = KIND
    format: int = FORMAT

    @property
    def processor(self) -> float:
        """Seconds of a processor of all runs."""
        return sum(run.processor for run in self.runs)

    def verdicts(self, changed: bool = False) -> list[Verdict]:
        """One a statement; `stale` where the code has changed since."""
        return ["stale" if changed and s.verdict in ORDER else s.verdict for s in self.statements]

    def write(self, path: Path) -> None:
        """Over nothing but an earlier record; all of it or nothing."""
        table = record.AUTHOR | record.finite(asdict(self))
        files.write(path, json.dumps(table, allow_nan=False, indent=0) + "\n", KIND_OF_FILE)

    @staticmethod
    def read(path: Path) -> "ClaimRecord":
        """A ValueError says, in words about the file, why it holds no record of a claim."""
        return record.read(path, of_table)


KIND_OF_FILE = files.FileKind("record of a claim", (b'"written by": "gossamer"',))


def of_table(table: Any) -> ClaimRecord:
    if not isinstance(table, dict) or table.get("kind") != KIND:
        raise ValueError("it is of no claim: 'gossamer claims NAME' writes those")
    if table.get("format") != FORMAT:
        raise ValueError(f"it has format {table.get('format')!r}, and this version of gossamer reads format {FORMAT}")
    facts: dict[str, Any] = {k: v for k, v in table.items() if k not in record.AUTHOR}
    facts["statements"] = [
        record.made(JudgedStatement, {**s, "effect": [record.number(v) for v in s["effect"]]})
        for s in facts["statements"]
    ]
    facts["figures"] = [_figure(f) for f in facts["figures"]]
    facts["runs"] = [_run(r) for r in facts["runs"]]
    facts["earlier"] = [record.made(EarlierVerdicts, e) for e in facts["earlier"]]
    return record.made(ClaimRecord, facts)


def _run(table: dict[str, Any]) -> ClaimRun:
    rows = {name: [record.number(v) for v in row] for name, row in table["rows"].items()}
    return record.made(ClaimRun, {**table, "rows": rows})


def _figure(table: dict[str, Any]) -> ClaimFigure:
    lines = [Line(each["name"], [[record.number(v) for v in p] for p in each["points"]]) for each in table["lines"]]
    return record.made(ClaimFigure, {**table, "lines": lines})


# -- a claim that grows: statements that waited get a rule, a judge and runs ---------------------------------------------------


def grown(known: ClaimRecord, fresh: ClaimRecord) -> ClaimRecord | None:
    """The record to go on with, where the plan of `fresh` is that of `known` and more; None where anything else has changed.

    All studies must be there as they were planned, and all statements that were judged with their rule and what was expected
    of them. Runs and verdicts stay; whatever is new is still to be run. Fingerprints of code stay too, so that the verdicts
    are stale where that code has changed, until `--confirm`.
    """
    before = {s.key: s for s in known.statements}
    adds = {*fresh.settings} - {*known.settings} or any(before.get(s.key, s).rule != s.rule for s in fresh.statements)
    if not known.done or not adds or not _has_all(known.settings, fresh.settings):
        return None
    if {*before} - {s.key for s in fresh.statements}:
        return None
    statements = list[JudgedStatement]()
    for new in fresh.statements:
        old = before.get(new.key)
        if old is None or old.verdict not in ORDER:
            statements.append(new)
        elif (old.rule, old.expected) == (new.rule, new.expected):
            statements.append(replace(old, says=new.says, plan=old.plan or known.plan))
        else:
            return None
    return replace(
        known,
        paper=fresh.paper,
        setup=fresh.setup,
        limits=fresh.limits,
        plan=fresh.plan,
        settings=fresh.settings,
        sources={**fresh.sources, **known.sources},
        statements=statements,
        seeds=sorted({*known.seeds, *fresh.seeds}),
        done=False,
    )


def _has_all(known: dict[str, Any], fresh: dict[str, Any]) -> bool:
    """True if each study is there as it was; a record has gone through JSON, which has lists for tuples."""
    asked: dict[str, Any] = json.loads(json.dumps(fresh))
    return all(asked.get(name) == json.loads(json.dumps(study)) for name, study in known.items())
