"""A claim that grows: statements that waited get a rule, a judge and runs, and what was judged before stays as it was found."""

import json
from dataclasses import replace
from typing import Any

from gossamer.bench.claims.record import ClaimRecord, JudgedStatement
from gossamer.bench.claims.verdict import ORDER


def grown(known: ClaimRecord, fresh: ClaimRecord) -> ClaimRecord | None:
    """The record to go on with, where the plan of `fresh` is that of `known` and more; None where anything else has changed.

    All studies must be there as they were planned, and all statements that were judged with their rule and what was expected
    of them. Runs and verdicts stay; whatever is new is still to be run. Fingerprints of code stay too, so that the verdicts
    are stale where that code has changed, until `--confirm`.
    """
    if not known.done or not _has_all(known.settings, fresh.settings):
        return None
    before = {s.key: s for s in known.statements}
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
