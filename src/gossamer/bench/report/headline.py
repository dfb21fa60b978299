"""The first thing a reader sees: who reached the baseline's quality soonest, said in plain words."""

from typing import NamedTuple

from gossamer.bench.record import named
from gossamer.bench.report.formatting import number, quality, seconds, size
from gossamer.bench.report.study import RunRow, Study
from gossamer.core.text import listed


class Headline(NamedTuple):
    title: str
    detail: str  # may be empty


def headline(study: Study) -> Headline:
    """One sentence that could stand alone, and one that gives it measure.

    >>> from gossamer.bench.record import Record
    >>> from gossamer.bench.report.study import study_of
    >>> headline(study_of(Record("", "", "lm", "", "loss", True, 1, 4, "200mbit", 0))).title
    'No run left a result.'
    """
    if not any(r.run.steps for r in study.rows):
        return Headline("No run left a result.", _failures(study))
    if study.record.timing:
        return _of_steps(study)
    base = study.base
    if base is None or study.target is None or base.reached is None:
        return _without_target(study)
    if not study.others:
        return _alone(base, study)
    return Headline(*_against(base, study))


def _against(base: RunRow, study: Study) -> tuple[str, str]:
    metric, stopped, several = quality(study.record.metric), _stopped(base), len(study.record.trials) > 1
    goal = f"its final {metric}" if several else f"{metric} {number(study.target)}"
    arrived = [r for r in study.others if r.reached is not None]
    if not arrived:
        if all(r.cut for r in study.others):
            return f"{label(base)} alone ended with a result: {metric} {number(base.final)}.", stopped
        every = "every" if any(r.some_missed for r in study.others) else "any"
        goal = f" on {every} seed" if several else f", {number(study.target)}"
        title = f"No recipe reached {owner(base)} final {metric}{goal}: {_closest(base, study)}."
        return title, _said(_together(base, study), stopped)
    best = arrived[0]
    ratio = best.time_ratio or 1.0
    if ratio >= 1:
        times = f"{seconds(best.reached)} instead of {seconds(base.reached)}"
        title = f"Nothing beat {label(base)} to {goal}: the next, {best.run.name}, took {times}."
        return title, stopped or "On this network, saying less did not pay."
    if base in study.first:
        times = f"{seconds(best.reached)} and {seconds(base.reached)}"
        return f"{best.run.name} was hardly faster than {label(base)} to {goal}: {times}.", _said(
            _noise(study), stopped
        )
    span = _from_to([seconds(r.reached) for r in study.first])
    title = f"{_winners(study)} as {label(base)} to {goal}: {span} instead of {seconds(base.reached)}."
    return title, _said(_rest(base, study), _saved(best, base), _together(base, study), stopped)


def _winners(study: Study) -> str:
    """Who was first and by how much; of several that nobody can tell apart, all."""
    first = study.first
    pace = _from_to([number(1 / (r.time_ratio or 1.0), 2) for r in reversed(first)])
    if len(first) == 1:
        return f"{first[0].run.name} was {pace} times as fast"
    return f"{listed([r.run.name for r in first])} are tied: {pace} times as fast"


def _from_to(texts: list[str]) -> str:
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


def _noise(study: Study) -> str:
    many = len(study.record.trials)
    return "Another run may turn them round." if many == 1 else f"{many} seeds do not tell them apart."


def _said(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


def _rest(base: RunRow, study: Study) -> str:
    if len(study.others) == 1:
        return ""
    faster = [r for r in study.others if r.reached is not None and (r.time_ratio or 1.0) < 1]
    missed = [r.run.name for r in study.others if r.reached is None and not r.cut]
    said = f"{len(faster)} of {len(study.others)} recipes were faster to that quality than {label(base)}."
    if len(study.first) > 1:
        said += f" {_noise(study)}"
    return said + (f" {listed(missed)} did not get there." if missed else "")


def _together(base: RunRow, study: Study) -> str:
    """A script has as many steps for all, so who learns less from one never gets to the end: say who was quick to where all got."""
    there = [(r.common, r) for r in study.others if r.common is not None]
    if not study.record.script or base.common is None or not there:
        return ""
    soonest, row = min(there, key=lambda each: each[0])
    to = f"To {number(study.common)}, the last that all reached, {row.run.name}"
    return f"{to} was first: {seconds(soonest)}, {label(base)} {seconds(base.common)}."


def _saved(best: RunRow, base: RunRow) -> str:
    if best.reached_sent is None or base.reached_sent is None:
        return ""
    if not best.reached_sent:
        return f"By then {best.run.name} had sent nothing: its ranks had trained alone."
    return (
        f"On the way {best.run.name} sent {size(best.reached_sent)} per host, {label(base)} {size(base.reached_sent)}."
    )


def _closest(base: RunRow, study: Study) -> str:
    ended = [r for r in study.others if r.final is not None]
    if not ended:
        told = any(r.run.evaluations for r in study.others)
        return f"none ended with a usable {quality(study.record.metric)}" if told else "none was evaluated"
    best = _best(ended, study)
    several = len(study.record.trials) > 1
    goal = (base.final if several else study.target) or 0.0  # what it ended with is a mean over seeds, too
    off = ((best.final or 0.0) - goal) / (abs(goal) or 1.0) * (1 if study.record.lower_is_better else -1)
    if several:
        how = f"{number(100 * off, 2)} % short of it" if off > 0 else "as good as it"
        return f"closest was {best.run.name}, {how} in the mean over seeds"
    time = best.run.evaluations[-1].seconds / (base.reached or 1.0)
    short = f"{number(100 * off, 2)} % short of it"
    return f"closest was {best.run.name}, {short} after {number(time, 2)} of {owner(base)} time"


def _best(rows: list[RunRow], study: Study) -> RunRow:
    sign = 1 if study.record.lower_is_better else -1
    return min(rows, key=lambda r: sign * (r.final or 0.0))


def _stopped(base: RunRow) -> str:
    if not base.cut:
        return ""
    how = "was interrupted" if base.run.status == "interrupted" else "failed on the way"
    return f"{label(base)} {how}, so what counts is the last quality that all reached."


def _alone(row: RunRow, study: Study) -> Headline:
    metric = quality(study.record.metric)
    last = row.run.evaluations[-1]
    title = f"{row.run.name} ended with {metric} {number(row.final)} after {seconds(last.seconds)}."
    sent = f"It sent {size(last.sent)} per host." if last.sent is not None else ""
    return Headline(title, _said(sent, "There is no other run to compare it with."))


def _of_steps(study: Study) -> Headline:
    """Whose step was shortest, where steps alone were compared."""
    timed = [r for r in study.rows if r.step is not None and not r.cut]
    computed = study.record.compute
    why = f"Computing was emulated ({computed}), so losses mean nothing." if computed else ""
    if len(study.record.trials) > 1:
        why = _said(f"Steps are those of seed {study.record.seed}.", why)
    alone = next((f"Computing alone took {seconds(r.step)}." for r in timed if r.run.alone), "")
    best = next((r for r in timed if not r.run.alone), None)
    if best is None:
        return Headline("No recipe came to its end.", _said(_failures(study), alone, why))
    if len(timed) == 1:
        return Headline(f"{label(best)} took {seconds(best.step)} a step.", why)
    title = f"{label(best)} had the shortest mean step, {seconds(best.step)}"
    if best.step_ratio is not None and not best.baseline:
        title += f": {number(best.step_ratio, 2)} of {owner(study.base or best)}"
    return Headline(title + ".", _said(alone, why))


def _without_target(study: Study) -> Headline:
    """No baseline to measure against: say what there is, and why it is not more."""
    ended = [r for r in study.rows if r.final is not None and r.run.evaluations and r.run.evaluations[-1].step]
    why = _why_no_target(study)
    if len(study.rows) == len(ended) == 1:
        return _alone(ended[0], study)
    if not ended:
        return Headline(_unjudged(study), _said(why, _failures(study)))
    best = _best(ended, study)
    after = seconds(best.run.evaluations[-1].seconds)
    title = f"{best.run.name} ended with the best {quality(study.record.metric)}: {number(best.final)} after {after}."
    return Headline(title, why)


def _unjudged(study: Study) -> str:
    """Why no run has a last quality; that of the untrained model is none."""
    steps = [e.step for r in study.rows for e in r.run.evaluations]
    if any(steps):
        return f"No run ended with a usable {quality(study.record.metric)}."
    return f"No run was evaluated {'after its start' if steps else 'on held-out data'}."


def _why_no_target(study: Study) -> str:
    base = study.base
    if base is None:
        return f"No run is called {study.record.baseline}, so there is no baseline to measure against."
    metric = quality(study.record.metric)
    if base.final is None:
        return f"{label(base)} has no usable {metric}, so there is no target to time."
    trials = study.record.trials  # of several seeds, the first one with which it sets none
    runs = [(seed, named(runs, base.run.name)) for seed, runs in trials.items() if study.record.target(runs) is None]
    seed, run = next(((seed, run) for seed, run in runs if run), (study.record.seed, base.run))
    where = f" with seed {seed}" if len(trials) > 1 else ""
    if len(run.evaluations) < 2:
        return f"{label(base)} was not evaluated after its start{where}, so there is no target to time."
    return f"{label(base)} ended with no better {metric} than it began with{where}, so there is no target to time."


def _failures(study: Study) -> str:
    by = {status: [r.run.name for r in study.rows if r.run.status == status] for status in ("failed", "interrupted")}
    return _said(*(f"{status.capitalize()}: {listed(names)}." for status, names in by.items() if names))


def label(row: RunRow) -> str:
    """How a sentence names a run: DDP is an abbreviation, the rest are names of recipes."""
    return "DDP" if row.run.name == "ddp" else row.run.name


def owner(row: RunRow) -> str:
    return f"{label(row)}’s"
