"""The pages of docs/claims, made from records alone: one a claim, and the table of all."""

from collections import Counter
from collections.abc import Sequence
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
        tail += ["## Earlier plans", *(_earlier(known))]
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
    return (
        f"`gossamer claims {known.claim} --records FOLDER` does the same elsewhere. Judged seeds: {seeds}. "
        f"{len(known.runs)} runs, {known.processor / 60:.1f} minutes of a processor, {known.wall / 60:.1f} minutes by "
        f"the clock on two processes.{late} Commit {known.commit or 'unknown'}, plan {known.plan}, "
        f"{known.created[:10]}; {versions}; {known.machine}. All settings and curves: "
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
    """The table of all statements, and the counts."""
    rows = ["| claim | statement | verdict | expected | effect | seeds | minutes |", "|" + " --- |" * 7]
    rows += [_row(known, s) for known in records for s in known.statements]
    return "\n\n".join(
        ["# What papers claim, and what was found", _text(INTRODUCTION), counts(records), "\n".join(rows)]
    ) + ("\n\n" + _contents(records))


INTRODUCTION = (
    "Each claim was planned before it was run, with its rule; it was run once, and the verdict stands as it was found. "
    "`gossamer claims` lists this table, `gossamer claims NAME` runs one. *Holds*, *partly* and *not* speak of our "
    "scale alone: each page says what that cannot show. Bounds hold with 95 per cent each, so of twenty statements "
    "that are not true about one holds by luck. How to write one: the docstring of `gossamer.bench.claims`."
)


def counts(records: Sequence[ClaimRecord]) -> str:
    """How many statements were judged, with which verdicts, and how many as expected."""
    found = Counter(s.verdict for known in records for s in known.statements)
    judged = [s for known in records for s in known.statements if s.verdict in ORDER]
    told = ", ".join(f"{found[v]} {v}" for v in ORDER)
    as_expected = sum(s.verdict == s.expected for s in judged)
    return f"{len(judged)} statements judged: {told}; {found['waiting']} wait. {as_expected} came out as expected."


def _row(known: ClaimRecord, s: JudgedStatement) -> str:
    effect = "{:.3g} [{:.3g}, {:.3g}] {}".format(*s.effect, s.unit).strip() if s.effect else ""
    says = s.says.replace("|", "\\|")
    seeds, minutes = (len(known.seeds), f"{known.wall / 60:.1f}") if s.verdict in ORDER else ("", "")
    link = f"[{known.claim}]({known.claim}.md)"
    return f"| {link} | {s.key}. {says} | {s.verdict} | {s.expected} | {effect} | {seeds} | {minutes} |"


def _contents(records: Sequence[ClaimRecord]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", "", *(known.claim for known in records), "```", ""])


def drawn(figure: ClaimFigure) -> str:
    """The figure as SVG, by the report's charts."""
    series = [Series(i, [(p[0], p[1], 0, None) for p in line.points]) for i, line in enumerate(figure.lines)]
    x, y = Axis(figure.x, "number", figure.log_x), Axis(figure.y, "number", figure.log_y)
    chart = LineChart(figure.id, figure.title, "", x, y, series, marks=True)
    styles = [Style(HUES[i % len(HUES)], MARKS[(i + i // len(HUES)) % len(MARKS)], False) for i in range(len(series))]
    return svg.lines(chart, [line.name for line in figure.lines], styles)
