"""The answer of `gossamer goodput` as text, and as JSON."""

import math
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gossamer.bench.cli.console import columns, print_table
from gossamer.bench.report.charts import spaced
from gossamer.bench.report.formatting import seconds
from gossamer.bench.report.goodput_study import GoodputStudy, percent
from gossamer.costs.goodput import Goodput
from gossamer.costs.quantities import Price
from gossamer.costs.spent import CAUSES, Spent

SHOWN = 12  # held-out values in a terminal


def show(out: Console, found: Goodput, price: Price | None) -> None:
    """A sentence, the causes, the ranks, and what money bought."""
    study = GoodputStudy(found, price)
    out.print(f"[bold]{escape(study.title)}[/]")
    out.print(study.detail, style="dim", markup=False)
    out.print(_causes(study))
    if len(found.ranks) > 1:
        out.print()
        print_table(out, _ranks(study))
    if found.held_out:
        out.print()
        out.print(_held_out(study))
    for note in study.notes:
        out.print(note, style="dim", markup=False)


def _causes(study: GoodputStudy) -> Table:
    table = _grid("", "share", "time", *(["cost"] if study.price else []))
    spent = study.found.spent
    for cause, name in CAUSES.items():
        value = getattr(spent, cause)
        table.add_row(name, percent(value, spent.paid), seconds(value), *_money(study, value))
    table.add_row("all that was paid for", "", seconds(spent.paid), *_money(study, spent.paid), style="dim")
    return table


def _ranks(study: GoodputStudy) -> Table:
    table = _grid("rank", "starts", "paid", "step", *(escape(CAUSES[cause]) for cause in CAUSES))
    for rank in study.found.ranks:
        spent = rank.spent
        shares = [percent(getattr(spent, cause), spent.paid) for cause in CAUSES]
        table.add_row(str(rank.rank), str(len(rank.processes)), seconds(spent.paid), str(rank.last), *shares)
    return table


def _held_out(study: GoodputStudy) -> Table:
    table = _grid("step", "held out", "paid time", *(["cost"] if study.price else []))
    for value in spaced(study.found.held_out, SHOWN):
        table.add_row(str(value.step), f"{value.value:.4f}", seconds(value.paid), *_money(study, value.paid))
    return table


def _money(study: GoodputStudy, value: float) -> list[str]:
    return [study.money(value)] if study.price else []


def _grid(*heads: str) -> Table:
    table = columns(*heads)
    table.header_style = "dim"
    return table


# -- JSON ------------------------------------------------------------------------------------------------------------------


def as_dict(found: Goodput, price: Price | None) -> dict[str, Any]:
    """All that is known, for programs; seconds, and shares of the paid time."""
    study = GoodputStudy(found, price)
    return {
        "folder": str(found.folder),
        "recipe": found.recipe,
        "goodput": found.spent.share,
        **_spent(found.spent),
        "last_step": found.last,
        "money": None if price is None else _cost(study),
        "held_out": [
            {
                "step": each.step,
                "value": each.value if math.isfinite(each.value) else None,
                "paid_seconds": each.paid,
                "cost": study.cost(each.paid),
            }
            for each in found.held_out
        ],
        "ranks": [
            {
                "rank": rank.rank,
                "last_step": rank.last,
                **_spent(rank.spent),
                "processes": [
                    {
                        "file": p.events.path.name,
                        "machine": p.events.machine,
                        "first_step": p.events.first,
                        "last_step": p.events.last,
                        "ended": p.events.ended,
                        "told_to_stop": p.events.told is not None,
                        "paid_seconds_until_next": p.gap,
                        "unpaid_seconds_until_next": p.away,
                        **_spent(p.spent),
                    }
                    for p in rank.processes
                ],
            }
            for rank in found.ranks
        ],
        "notes": study.notes,
    }


def _spent(spent: Spent) -> dict[str, Any]:
    return {
        "paid_seconds": spent.paid,
        "seconds": spent.by_cause,
        "exchange_seconds": spent.exchange,
        "steps_that_count": spent.counted,
    }


def _cost(study: GoodputStudy) -> dict[str, Any]:
    assert study.price is not None
    return {
        "currency": study.price.currency,
        "per_rank_and_hour": study.price.amount,
        "total": study.cost(study.found.spent.paid),
        "per_1000_steps": study.per_thousand,
    }
