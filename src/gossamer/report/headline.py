"""The first thing a reader sees: who reached the baseline's quality soonest, said in plain words."""

from typing import NamedTuple

from gossamer.report.facts import Facts, Row
from gossamer.report.words import listed, number, quality, seconds, size


class Headline(NamedTuple):
    title: str
    detail: str  # may be empty


def headline(facts: Facts) -> Headline:
    """One sentence that could stand alone, and one that gives it measure.

    >>> from gossamer.record import Record
    >>> from gossamer.report.facts import study
    >>> headline(study(Record("", "", "lm", "", "loss", True, 1, 4, "200mbit", 0))).title
    'No run left a result.'
    """
    if not any(r.run.steps or r.run.evaluations for r in facts.rows):
        return Headline("No run left a result.", _failures(facts))
    base = facts.base
    if base is None or facts.target is None or base.reached is None:
        return _without_target(facts)
    if not facts.others:
        return _alone(base, facts)
    return Headline(*_against(base, facts))


def _against(base: Row, facts: Facts) -> tuple[str, str]:
    goal = f"{owner(base)} final {quality(facts.record.metric)} {number(facts.target)}"
    arrived = [r for r in facts.others if r.reached is not None]
    faster = [r for r in arrived if (r.time_ratio or 1) < 1]
    if not arrived:
        title = f"No recipe reached {goal} in this run."
        return title, " ".join(filter(None, [_closest(base, facts), _stopped(base)]))
    best = arrived[0]
    times = f"{seconds(best.reached)} instead of {seconds(base.reached)}"
    if not faster:
        title = f"Nothing beat {label(base)} here: {best.run.name} came closest to {goal}, in {times}."
        return title, _stopped(base) or "On this network compression did not pay."
    title = f"{best.run.name} reached {goal} in {number(best.time_ratio, 2)} of {owner(base)} time: {times}."
    return title, " ".join(filter(None, [_rest(faster, base, facts), _saved(best, base), _stopped(base)]))


def _rest(faster: list[Row], base: Row, facts: Facts) -> str:
    if len(facts.others) == 1:
        return ""
    missed = [r.run.name for r in facts.others if r.reached is None]
    said = f"{len(faster)} of {len(facts.others)} recipes were faster to that quality than {label(base)}."
    return said + (f" Not reached by {listed(missed)}." if missed else "")


def _saved(best: Row, base: Row) -> str:
    if best.reached_sent is None or base.reached_sent is None:
        return ""
    return (
        f"On the way {best.run.name} sent {size(best.reached_sent)} per host, {label(base)} {size(base.reached_sent)}."
    )


def _closest(base: Row, facts: Facts) -> str:
    ended = [r for r in facts.others if r.final is not None]
    if not ended:
        return "None was evaluated."
    sign = 1 if facts.record.lower_is_better else -1
    best = min(ended, key=lambda r: sign * (r.final or 0.0))
    off = abs((best.final or 0.0) - (facts.target or 0.0)) / (abs(facts.target or 0.0) or 1.0)
    time = best.run.evaluations[-1].seconds / (base.reached or 1.0)
    short = f"{number(100 * off, 2)} % short of it"
    return f"Closest was {best.run.name}, {short} after {number(time, 2)} of {owner(base)} time."


def _stopped(base: Row) -> str:
    return f"{label(base)} stopped early, so its last evaluation stands in for its final one." if base.failed else ""


def _alone(row: Row, facts: Facts) -> Headline:
    metric = quality(facts.record.metric)
    last = row.run.evaluations[-1]
    title = f"{row.run.name} ended with {metric} {number(row.final)} after {seconds(last.seconds)}."
    return Headline(title, f"It sent {size(last.sent)} per host. There is no other run to compare it with.")


def _without_target(facts: Facts) -> Headline:
    """No baseline to measure against: say what there is, and why it is not more."""
    ended = [r for r in facts.rows if r.final is not None]
    base = facts.record.run(facts.record.baseline)
    if base is None:
        why = f"No run is called {facts.record.baseline}, so there is no baseline to measure against."
    else:
        why = f"{facts.record.baseline} has no usable held-out {facts.record.metric}, so there is no target to time."
    if len(ended) == 1:
        return _alone(ended[0], facts)
    if not ended:
        return Headline("No run was evaluated on held-out data.", why + _failures(facts))
    sign = 1 if facts.record.lower_is_better else -1
    best = min(ended, key=lambda r: sign * (r.final or 0.0))
    after = seconds(best.run.evaluations[-1].seconds)
    title = f"{best.run.name} ended with the best {quality(facts.record.metric)}: {number(best.final)} after {after}."
    return Headline(title, why)


def _failures(facts: Facts) -> str:
    failed = [r.run.name for r in facts.rows if r.failed]
    return f" Failed: {listed(failed)}." if failed else ""


def label(row: Row) -> str:
    """How a sentence names a run: DDP is an abbreviation, the rest are names of recipes."""
    return "DDP" if row.run.name == "ddp" else row.run.name


def owner(row: Row) -> str:
    return f"{label(row)}’s"
