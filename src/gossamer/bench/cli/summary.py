"""What a comparison prints at its end: a sentence, a table, and what to know about single runs."""

from rich.markup import escape
from rich.table import Table

from gossamer.bench.cli.console import columns, console, print_table
from gossamer.bench.record import Record
from gossamer.bench.report.formatting import fixed, ranks_on, seconds, seeds_of, severe, size
from gossamer.bench.report.headline import headline
from gossamer.bench.report.study import TOLERANCE, RunRow, Study, study_of


def summary(record: Record) -> None:
    """Print the outcome: a sentence, and a table with the fastest run to the baseline's quality first."""
    out, study = console(), study_of(record)
    where = "not shaped" if record.rate == "unshaped" else f"at {record.rate}"
    seeds = "" if record.script else f", {seeds_of(record.trials)}"  # a script has its own
    out.print(f"\n[bold]{escape(record.workload)}[/], {_ranks_text(record)}, {where}{seeds}{severe(study.severity)}")
    out.print(headline(study).title, markup=False, style="bold")
    seed = f" with seed {record.seed}" if len(record.trials) > 1 else ""
    if study.target is not None and len(record.runs) > 1:
        whose = "all reached last" if study.base and study.base.cut else f"{record.baseline} ended with"
        told = f"time and steps to the {record.metric} that {whose}, {fixed(study.target, 4)}{seed}"
        out.print(told, markup=False, style="dim")
    print_table(out, _table(study))
    if study.common is not None:
        times = [f"{row.run.name} {seconds(row.common)}" for row in study.rows if row.common is not None]
        told = f"to {fixed(study.common, 4)}, the last quality that all reached{seed}: {', '.join(times)}"
        out.print(told, markup=False, style="dim")
    if any(row.run.lr != 1 for row in study.rows):
        told = ", ".join(f"{row.run.name} {row.run.lr:g}" for row in study.rows)
        out.print(f"learning rates, in multiples of the workload's: {told}", style="dim", markup=False)
    for row in study.rows:
        for said in (row.run.error if row.cut else "", row.spoilt, row.stale):
            if said:
                out.print(f"{row.run.name}: {said}", markup=False)
    if any(row.nic_off for row in study.rows):
        out.print(f"! the interface counted {TOLERANCE:.0%} more or less than we did", style="dim", markup=False)
    if record.note:
        out.print(record.note, style="dim", markup=False)


def _ranks_text(record: Record) -> str:
    """
    >>> _ranks_text(Record("", "", "lm", "", "loss", True, 1, 4, "unshaped", 0))
    '4 ranks'
    """
    if record.per_host > 1:
        return f"{record.hosts * record.per_host} ranks on {ranks_on(record.hosts)}"
    return f"{record.hosts} rank{'s' * (record.hosts > 1)}"


def _table(study: Study) -> Table:
    several, timing = len(study.rows) > 1, study.record.timing
    base = study.record.baseline if len(study.record.baseline) < 12 else "baseline"
    heads = ["recipe", "steps", "mean step", "sent/step", "NIC/wire", "last"]
    if timing:
        heads = ["recipe", "steps", "mean step", f"vs {base}", "exposed wait", "processor", "sent/step", "NIC/wire"]
    elif several:
        heads[1:1] = ["time", f"vs {base}"]
    table = columns(*map(escape, heads))
    for row in study.rows:
        table.add_row(*map(escape, _step_cells(row) if timing else _cells(row, several)))
    return table


def _cells(row: RunRow, several: bool) -> list[str]:
    """Cells of one row; unknown values are empty."""
    time = seconds(row.reached) if row.reached is not None else row.outcome
    compared = [time, _ratio(row)] if several else []
    steps = round(row.reached_steps) if several and row.reached_steps else row.run.done
    last = "" if row.final is None else fixed(row.final, 4)
    return [row.run.name, *compared, str(steps or ""), "" if row.step is None else seconds(row.step), *_sent(row), last]


def _step_cells(row: RunRow) -> list[str]:
    """Cells of one row where steps are compared."""
    used = row.run.processor
    return [
        row.run.name,
        str(row.run.done or ""),
        "" if row.step is None else seconds(row.step),
        "" if row.step_ratio is None else f"{row.step_ratio:.2f}",
        "" if row.wait is None else seconds(row.wait),
        "" if used is None else seconds(used),
        *_sent(row),
    ]


def _sent(row: RunRow) -> list[str]:
    return [
        "" if row.wire_step is None else size(row.wire_step),
        "" if row.nic_ratio is None else f"{row.nic_ratio:.3f}" + ("!" if row.nic_off else ""),
    ]


def _ratio(row: RunRow) -> str:
    if not row.time_ratio:
        return ""
    bounds = " [{:.2f}, {:.2f}]".format(*row.time_bounds) if row.time_bounds else ""
    return f"{row.time_ratio:.2f}{bounds}{' tied' * row.tied}"
