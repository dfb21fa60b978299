"""The pages of docs/claims, made from records alone: one a claim, and the table of all."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill

from gossamer.bench.claims.evidence import ClaimFigure
from gossamer.bench.claims.record import ClaimRecord, JudgedStatement
from gossamer.bench.claims.verdict import ORDER
from gossamer.bench.report import svg
from gossamer.bench.report.charts import Axis, LineChart, Series
from gossamer.bench.report.palette import HUES, MARKS, Style
from gossamer.core import files

AUTHOR = "<!-- a page of claims, written by gossamer -->\n\n"
PAGE = files.FileKind("page of claims", (AUTHOR.strip().encode(),))
COLUMNS = 118
LIMIT = 600.0  # seconds that a claim may take on two cores


def write_pages(records: Sequence[ClaimRecord], folder: Path) -> list[Path]:
    """Write a page and the figures of each claim, and the index."""
    written = list[Path]()
    for known in records:
        for figure in known.figures:
            path = folder / f"{known.claim}-{figure.id}.svg"
            files.write(path, drawn(figure), svg.SVG)
            written.append(path)
        written.append(_page(folder / f"{known.claim}.md", page(known)))
    written.append(_page(folder / "index.md", index(records)))
    return written


def _page(path: Path, text: str) -> Path:
    files.write(path, AUTHOR + text, PAGE)
    return path


def page(known: ClaimRecord) -> str:
    """One claim: what the paper says, what was run, what was found, and what it cannot show."""
    head = [f"# {known.claim}", _text(known.paper), "## What was run", "\n".join(map(_item, known.setup))]
    figures = [f"![{f.title}]({known.claim}-{f.id}.svg)\n\n{f.title}." for f in known.figures]
    body = ["## What was found", *(_statement(s) for s in known.statements), *figures]
    tail = ["## What our scale cannot show", _text(known.limits), "## How", _text(_how(known))]
    if known.earlier:
        tail += ["## Earlier verdicts", *(_earlier(known))]
    return "\n\n".join([*head, *body, *tail]) + "\n"


def _statement(s: JudgedStatement) -> str:
    said = [f"Verdict: **{s.verdict}** (expected: {s.expected})", f"Rule: {s.rule}"]
    if s.found:
        said.insert(1, f"Found: {s.found}")
    if s.plan or s.commit:
        parts = (f"plan {s.plan}" if s.plan else "", f"commit {s.commit}" if s.commit else "")
        said.append(f"Judged by {', '.join(filter(None, parts))}")
    return _text(f"**{s.key}. {s.says}**") + "\n\n" + "\n".join(map(_item, said))


def _text(words: str) -> str:
    return fill(words, COLUMNS, break_long_words=False, break_on_hyphens=False)


def _item(words: str) -> str:
    return fill(f"- {words}", COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _how(known: ClaimRecord) -> str:
    if not known.runs:
        return f"It has not been run. `gossamer claims {known.claim}` does it; its plan is {known.plan}."
    seeds = ", ".join(map(str, known.seeds))
    versions = ", ".join(f"{name} {version}" for name, version in known.versions.items())
    late = " That is longer than the ten minutes which a claim may take." if known.wall > LIMIT else ""
    again = (
        f" At commit {known.confirmed} the runs of seed {min(known.seeds)} came out the same."
        if known.confirmed
        else ""
    )
    return (
        f"`gossamer claims {known.claim} --records FOLDER` does the same elsewhere. Judged seeds: {seeds}. "
        f"{len(known.runs)} runs, {known.processor / 60:.1f} minutes of a processor, {known.wall / 60:.1f} minutes by "
        f"the clock on two processes.{late} Commit {known.commit or 'unknown'}, plan {known.plan}, "
        f"{known.created[:10]}; {versions}; {known.machine}.{again} All settings and curves: "
        f"[the record](records/{known.claim}.json)."
    )


def _earlier(known: ClaimRecord) -> list[str]:
    return [
        _text(
            f"Plan {e.plan} (commit {e.commit}, {e.created[:10]}): "
            + "; ".join(f"{key} {verdict}, {e.found.get(key, '')}" for key, verdict in e.verdicts.items())
        )
        for e in known.earlier
    ]


def index(records: Sequence[ClaimRecord]) -> str:
    """All statements, by verdict, each as large as the others; and what all this cannot show."""
    parts = [
        "# What papers claim, and what was found",
        _text(INTRODUCTION),
        "\n".join(map(_item, READING)),
        counts(records),
    ]
    for verdict, heading in HEADINGS.items():
        found = [(known, s) for known in records for s in known.statements if s.verdict == verdict]
        if found:
            parts += [f"## {heading}: {len(found)}", _table(found, verdict)]
    limits = [_item(f"[{known.claim}]({known.claim}.md): {known.limits}") for known in records]
    parts += ["## What our scale cannot show", _text(SCALE), "\n".join(limits), _text(WRITING), _contents(records)]
    return "\n\n".join(parts)


HEADINGS: Mapping[str, str] = {
    "holds": "Holds", "partly": "Holds in part", "not": "Does not hold", "waiting": "Not judged yet",
}  # fmt: skip

INTRODUCTION = (
    "Papers promise that a method is as good as dense averages, or sends less, or takes less time. Here is what came out when "
    "we tried that, on two processor cores, with gossamer's own form of each method. Each statement got its rule, and what we "
    "expected, before anybody ran it; it was run once, on seeds that nobody had looked at, and stands as it was found."
)

READING = (
    "**Holds**: shown, with 95 per cent confidence where seeds differ. Of twenty statements that are not true about one holds "
    "by luck.",
    "**Holds in part**: so in the mean over seeds, but not beyond their noise; or some of several conditions. Little is shown: of "
    "two methods that are equally good, one is better in the mean half of the time.",
    "**Does not hold**: not at this scale, by this rule. It may hold in the paper's setting, where models are larger and runs are "
    "longer.",
    "Statements of time are of virtual time: each holds only if it does with a network .8, 1 and 1.5 times as slow as the planner "
    "says, which covers its [published error](../performance.md#planned-beside-measured).",
    "Minutes are those of the whole claim, by the clock, often on a machine that others used too. `gossamer claims` lists all this, and "
    "says *stale* where code that a verdict stands on has changed since.",
)

SCALE = (
    "Models have up to a few million parameters, runs take minutes, and ranks are simulated in one process. What that leaves "
    "open, claim by claim:"
)

WRITING = (
    "`gossamer claims NAME --records FOLDER` tries one again, elsewhere; with `--quick` it only sees, without a verdict, whether all "
    "of it still runs, and `--confirm` whether a stale verdict stands. How to write one: the docstring of `gossamer.bench.claims`."
)


def _table(found: Sequence[tuple[ClaimRecord, JudgedStatement]], verdict: str) -> str:
    heads = (
        "claim",
        "statement",
        "expected",
        *(("waits for",) if verdict == "waiting" else ("effect", "seeds", "minutes")),
    )
    rows = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for known, s in found:
        told = _waiting(s) if verdict == "waiting" else _judged(known, s)
        cells = (f"[{known.claim}]({known.claim}.md)", f"{s.key}. {s.says}", s.expected, *told)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _judged(known: ClaimRecord, s: JudgedStatement) -> tuple[str, ...]:
    effect = "{:.3g} [{:.3g}, {:.3g}] {}".format(*s.effect, s.unit).strip() if s.effect else ""
    return effect, _seeds(known), f"{known.wall / 60:.1f}"


def _seeds(known: ClaimRecord) -> str:
    """How many were judged; studies of one claim may have different numbers."""
    judged = [(run.study, run.seed) for run in known.runs if run.stage == "judged"]
    counts = sorted({len({seed for study, seed in judged if study == each}) for each, _ in judged})
    return "" if not counts else f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _waiting(s: JudgedStatement) -> tuple[str, ...]:
    return (s.found.removeprefix("it waits for ") or "its run",)


def counts(records: Sequence[ClaimRecord]) -> str:
    """How many statements were judged, with which verdicts, and how many as expected."""
    found = Counter(s.verdict for known in records for s in known.statements)
    judged = [s for known in records for s in known.statements if s.verdict in ORDER]
    told = ", ".join(f"{found[v]} {v}" for v in ORDER)
    as_expected = sum(s.verdict == s.expected for s in judged)
    return f"{len(judged)} statements judged: {told}; {found['waiting']} wait. {as_expected} came out as expected."


def _contents(records: Sequence[ClaimRecord]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", "", *(known.claim for known in records), "```", ""])


def drawn(figure: ClaimFigure) -> str:
    """The figure as SVG, by the report's charts."""
    kept = [[(p[0], p[1]) for p in line.points if math.isfinite(p[0] + p[1])] for line in figure.lines]
    series = [Series(i, [(x, y, 0, None) for x, y in points]) for i, points in enumerate(kept)]
    x, y = Axis(figure.x, "number", figure.log_x), Axis(figure.y, "number", figure.log_y)
    chart = LineChart(figure.id, figure.title, "", x, y, series, marks=True)
    styles = [Style(HUES[i % len(HUES)], MARKS[(i + i // len(HUES)) % len(MARKS)], False) for i in range(len(series))]
    return svg.lines(chart, [line.name for line in figure.lines], styles)
