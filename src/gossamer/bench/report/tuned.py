"""The page of a search: which recipe was best on seeds that nobody searched on, and all trials."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from gossamer.bench.report import formatting
from gossamer.bench.report.formatting import quality
from gossamer.bench.report.headline import Headline
from gossamer.bench.report.pages import PAGE, filled
from gossamer.bench.report.palette import BASELINE, Style, hues
from gossamer.bench.report.scatter import Point, scatter
from gossamer.bench.tune import Ranked, Trial, Tuning, at_an_end, ranking
from gossamer.bench.tune.knobs import at_rate
from gossamer.core import files
from gossamer.core.errors import RecipeError
from gossamer.core.text import listed
from gossamer.recipe import Recipe


@dataclass(frozen=True)
class CandidateRow:
    """One recipe's outcome, in words and numbers."""

    index: int  # in the record: colours follow it
    standing: Ranked
    trials: list[Trial]

    @property
    def name(self) -> str:
        return self.standing.contender.name

    @property
    def best(self) -> Trial | None:
        return self.standing.best

    @property
    def mean(self) -> float | None:
        return self.standing.mean

    @property
    def given(self) -> float | None:
        """The quality of the recipe as it was given."""
        first = next((t for t in self.trials if t.number == 0), None)
        return None if first is None else first.quality if first.outcome == "ok" else math.nan

    @property
    def verdict(self) -> str:
        """What the other seeds say, with the bounds of the difference.

        A difference is told in the metric's unit; positive is worse.
        """
        said, gap = self.standing.verdict, self.standing.gap
        if gap is None or said == "baseline":
            return {"one seed": "one seed shows nothing", "diverges": "diverges on another seed"}.get(said, said)
        return f"{said} ({self.number(gap.low)} to {self.number(gap.high)})"

    @property
    def expression(self) -> str:
        """What to type, and what the optimizer's learning rate has to be multiplied by if the recipe does not say it."""
        return "" if self.best is None else told(self.best)

    @staticmethod
    def number(value: float | None) -> str:
        return "" if value is None else formatting.number(value, 4)


@dataclass(frozen=True)
class SearchStudy:
    tuning: Tuning
    rows: list[CandidateRow]  # the best mean first
    notes: list[str]

    @property
    def baseline(self) -> str:
        return self.tuning.contenders[0].name

    @property
    def judged_on(self) -> str:
        return _count(len(self.tuning.seeds), "other seed")


def told(trial: Trial) -> str:
    """A trial's recipe; at which learning rate, where its schedule does not say so.

    >>> trial = Trial("", 0, 0, "allreduce(fp32()) + local_sgd(8)", 0.5, {}, "ok", 48, 4.0, 4.0, 0, 1.0)
    >>> told(trial)
    'allreduce(fp32()) + local_sgd(8), at 0.5 times the learning rate'
    """
    says = trial.lr == 1 or _says_rate(trial.recipe)
    return trial.recipe + ("" if says else f", at {trial.lr:g} times the learning rate")


def _says_rate(recipe: str) -> bool:
    """Whether its schedule holds the multiple of the learning rate: the `rate` of others is that of an outer step."""
    try:
        return at_rate(Recipe.of(recipe), 2.0)[1] == 1
    except RecipeError:  # it has parts of somebody's own, which are not imported here
        return re.search(r"(^|\+ )every_step\([^()]*\brate=", recipe) is not None


def studied(tuning: Tuning) -> SearchStudy:
    places = {c.name: i for i, c in enumerate(tuning.contenders)}
    rows = [CandidateRow(places[s.contender.name], s, tuning.searched(s.contender.name)) for s in ranking(tuning)]
    return SearchStudy(tuning, rows, _notes(tuning, rows))


def _notes(tuning: Tuning, rows: list[CandidateRow]) -> list[str]:
    """What a reader must know before believing it."""
    ends = [(r.name, end) for r in rows if r.best and (end := at_an_end(r.standing.contender, r.best))]
    notes = [] if tuning.complete else ["The search is not complete: --resume goes on with it."]
    for outcome, what in (("diverged", "diverged"), ("refused", "were refused")):
        lost = [t.contender for t in tuning.trials if t.outcome == outcome]
        if lost:
            of = listed([f"{lost.count(r.name)} of {r.name}" for r in rows if r.name in lost])
            notes.append(
                f"{_count(len(lost), 'trial')} {what if len(lost) > 1 else what.replace('were', 'was')}: {of}."
            )
    for end in ("lowest", "highest"):
        names = [name for name, at in ends if at == end]
        if names:
            are = "is" if len(names) == 1 else "are"
            notes.append(
                f"{listed(names)} {are} best near the {end} learning rate that was tried: --knob lr=LOW..HIGH looks beyond."
            )
    return notes


def headline(study: SearchStudy) -> Headline:
    """Who is best, as far as the seeds can tell."""
    tuning, metric = study.tuning, quality(study.tuning.metric)
    judged = [r for r in study.rows if r.mean is not None]
    if not judged:
        title = "Nothing was judged on another seed." if tuning.trials else "No trial has ended."
        return Headline(title, "")
    tied = [r.name for r in judged if r.standing.tied]
    number = CandidateRow.number(judged[0].mean)
    seeds = min(len(r.standing.judged) for r in judged)
    effort = f"{_count(tuning.trials_each, 'trial')} each and {_count(seeds, 'other seed')}"
    if len(tied) > 1:
        title = f"{listed(tied)}: no difference in {metric} that {effort} can show."
        return Headline(title, f"{judged[0].name} had {number}.")
    return Headline(f"{judged[0].name} was best: {metric} {number}, by {effort}.", "")


def _count(n: int, thing: str) -> str:
    return f"{n} {thing}{'s' * (n != 1)}"


def styles(tuning: Tuning) -> list[Style]:
    """The baseline has no hue, as in a comparison."""
    return [BASELINE, *hues(len(tuning.contenders))][: len(tuning.contenders)]


def points(study: SearchStudy) -> list[Point]:
    return [
        Point(row.index, t.lr, t.quality, t is row.best, f"{row.name}, trial {t.number + 1}: {row.number(t.quality)}")
        for row in study.rows
        for t in row.trials
        if t.outcome == "ok"
    ]


def render(tuning: Tuning) -> str:
    """The whole page as one HTML document, without a script."""
    study = studied(tuning)
    return filled(
        "tuned.html",
        study=study,
        tuning=tuning,
        head=headline(study),
        metric=formatting.quality(tuning.metric),
        styles=styles(tuning),
        chart=Markup(scatter(points(study), formatting.quality(tuning.metric), styles(tuning), tuning.lower_is_better)),
    )


def write_html(tuning: Tuning, path: Path, force: bool = False) -> None:
    """Over nothing but an earlier report, or with `force` any file."""
    files.write(path, render(tuning), PAGE, force)


def write_markdown(tuning: Tuning) -> str:
    """A headline and a table."""
    study = studied(tuning)
    heads = ["recipe", f"{quality(tuning.metric)}, {study.judged_on}", f"vs {study.baseline}", "best"]
    lines = [heads, ["---", "---:", "---", "---"]]
    lines += [[r.name, r.number(r.mean) or "–", r.verdict, f"`{r.expression}`"] for r in study.rows]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return "\n\n".join([f"**{headline(study).title}**", *study.notes, table, f"```\n{tuning.command}\n```"]) + "\n"
