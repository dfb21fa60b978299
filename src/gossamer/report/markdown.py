"""The report as text: for an issue, a pull request or a terminal."""

import re

from gossamer.record import Record
from gossamer.report.facts import Facts, Row, study
from gossamer.report.headline import headline
from gossamer.report.words import number, quality, rate, seconds, size


def write_markdown(record: Record) -> str:
    """A headline, a table, what failed, and how to do it again.

    >>> record = Record("gossamer compare", "", "lm", "", "loss", True, 1, 4, "200mbit", 0)
    >>> print(write_markdown(record).splitlines()[0])
    **No run left a result.**
    """
    facts = study(record)
    head = headline(facts)
    where = f"{record.summary or record.workload}, {record.hosts} hosts on {rate(record.rate)}, seed {record.seed}."
    parts = [f"**{_plain(head.title)}**", _plain(head.detail), _plain(where)]
    if record.note:
        parts.append(f"Note: {_plain(record.note)}")
    if facts.rows:
        parts.append(_table(facts))
    parts += [_failure(row) for row in facts.rows if row.failed]
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    parts.append(_fence(record.command) if record.command else "")
    parts.append(_plain("; ".join(filter(None, [record.created, record.machine, versions]))))
    return "\n\n".join(filter(None, parts)) + "\n"


def _table(facts: Facts) -> str:
    base = _cell(facts.record.baseline)
    goal = f" to {number(facts.target)}" if facts.target is not None else ""
    metric = _cell(quality(facts.record.metric))
    heads = ["recipe", f"time{goal}", f"of {base}", f"final {metric}", "median step", f"of {base}"]
    heads += ["compute", "codec", "exposed wait", "logical", "ledger", "interface", "interface / ledger"]
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1)]
    lines += [_cells(row, facts) for row in facts.rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cells(row: Row, facts: Facts) -> list[str]:
    run = row.run
    missed = "–" if facts.target is None else _cell(run.status) if row.failed else "not reached"
    nic = "–" if row.nic_ratio is None else f"{row.nic_ratio:.3f}"
    return [
        f"**{_cell(run.name)}**" if row.baseline else _cell(run.name),
        missed if row.reached is None else seconds(row.reached),
        number(row.time_ratio),
        number(row.final, 4),
        seconds(row.step),
        number(row.step_ratio),
        *(seconds(part) for part in (row.compute, row.codec, row.wait)),
        size(run.logical_bytes),
        size(run.wire_bytes),
        "not measured" if run.nic_bytes is None else size(run.nic_bytes),
        f"**{nic}** (off)" if row.nic_off else nic,
    ]


def _failure(row: Row) -> str:
    said = f"{_plain(row.run.name)}: {_plain(row.run.status)} after {len(row.run.steps)} steps."
    return said + ("\n\n" + _fence(row.run.error) if row.run.error else "")


def _fence(text: str) -> str:
    """A code block that no backticks inside can end."""
    longest = max((len(part) for part in _backticks(text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _backticks(text: str) -> list[str]:
    return re.findall("`+", text)


def _plain(text: str) -> str:
    """Text that Markdown leaves as it is."""
    for character in "\\*_`<[":
        text = text.replace(character, "\\" + character)
    return text.replace("\n", " ")


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")
