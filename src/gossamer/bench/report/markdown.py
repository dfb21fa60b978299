"""The report as text: for an issue, a pull request or a terminal."""

import re

from gossamer.bench.record import Record
from gossamer.bench.report.formatting import (
    capital,
    moment,
    number,
    quality,
    ranks_on,
    rate,
    seconds,
    seeds_of,
    severe,
    size,
    subject,
    times,
)
from gossamer.bench.report.headline import headline
from gossamer.bench.report.study import RunRow, Study, compared, study_of
from gossamer.core import files

AUTHOR = "<!-- a report, written by gossamer -->\n\n"
MARKDOWN = files.FileKind("report in Markdown", (AUTHOR.strip().encode(),))


def write_markdown(record: Record) -> str:
    """A headline, a table, what failed, and how to do it again.

    >>> record = Record("gossamer compare", "", "lm", "", "loss", True, 1, 4, "200mbit", 0)
    >>> print(write_markdown(record).splitlines()[0])
    **No run left a result.**
    """
    study = study_of(record)
    head = headline(study)
    what = record.summary if record.script else capital(subject(record.summary or record.workload))
    seeds = "" if record.script else f", {seeds_of(record.trials)}"
    where = f"{what}, {ranks_on(record.hosts, record.per_host)} on {rate(record.rate)}{seeds}{severe(study.severity)}."
    parts = [f"**{_plain(head.title)}**", _plain(head.detail), _plain(where)]
    if record.note:
        parts.append(f"Note: {_plain(record.note)}")
    if study.rows:
        parts.append(_table(study))
    parts += [_ending(row) for row in study.rows if row.cut]
    parts += [_plain(f"{row.run.name}: {row.spoilt}.") for row in study.rows if row.spoilt]
    parts += [_plain(f"{row.run.name}: {row.stale}.") for row in study.rows if row.stale]
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    parts.append(_fence(record.command) if record.command else "")
    parts.append(_plain("; ".join(filter(None, [moment(record.created), record.machine, versions]))))
    return "\n\n".join(filter(None, parts)) + "\n"


def _table(study: Study) -> str:
    base = _cell(study.record.baseline)
    goal = f" to {number(study.target)}" if study.target is not None and len(study.record.trials) == 1 else ""
    metric = _cell(quality(study.record.metric))
    heads = ["recipe", f"time{goal}", f"time vs {base}", "steps", "mean step", f"step vs {base}"]
    heads[3:3] = [f"time to {number(study.common)}"] if study.common is not None else []
    heads += ["compute", "codec", "exposed wait", "logical", "wire", *_inside(study, "inside")]
    heads += ["NIC", "NIC / wire", f"last {metric}"]
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1)]
    lines += [_cells(row, study) for row in study.rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cells(row: RunRow, study: Study) -> list[str]:
    run = row.run
    missed = "–" if study.target is None else row.outcome
    nic = "–" if row.nic_ratio is None else f"{row.nic_ratio:.3f}"
    return [
        f"**{_cell(run.name)}**" if row.baseline else _cell(run.name),
        missed if row.reached is None else seconds(row.reached),
        compared(row),
        *([seconds(row.common)] if study.common is not None else []),
        "–" if row.reached_steps is None else f"{row.reached_steps:.0f}",
        seconds(row.step),
        times(row.step_ratio),
        *(seconds(part) for part in (row.compute, row.codec, row.wait)),
        size(run.logical_bytes),
        size(run.sent),
        *_inside(study, size(run.inside_bytes)),
        size(run.nic_bytes),
        f"**{nic}** (off)" if row.nic_off else nic,
        number(row.final, 4),
    ]


def _inside(study: Study, cell: str) -> list[str]:
    """A column that only hosts of several ranks have."""
    return [cell] if study.record.per_host > 1 else []


def _ending(row: RunRow) -> str:
    steps = row.run.done
    said = f"{_plain(row.run.name)}: {row.run.status} after {steps} step{'s' if steps != 1 else ''}."
    return said + ("\n\n" + _fence(row.run.error) if row.run.status == "failed" and row.run.error else "")


def _fence(text: str) -> str:
    """A code block that no backticks inside can end."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _plain(text: str) -> str:
    """Text that Markdown leaves as it is."""
    for character in "\\*_`<[":
        text = text.replace(character, "\\" + character)
    return text.replace("\n", " ")


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")
