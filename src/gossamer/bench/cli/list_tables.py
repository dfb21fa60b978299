"""Tables of recipes and workloads, from rows made elsewhere; nothing here needs torch."""

import re
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gossamer.bench.cli.console import console

Card = dict[str, Any]
ROOMY = 120  # terminal columns from which expressions have their own column


def list_presets(rows: list[Card]) -> None:
    out = console()
    roomy = out.width >= ROOMY
    heads = ("recipe", "what it does", "to the end", "as an expression")
    table = Table(*(heads if roomy else heads[:3]), box=None, pad_edge=False)
    table.columns[0].no_wrap = table.columns[2].no_wrap = True
    for row in rows:
        name, words = f"[bold]{row['name']}[/]", summary(out, row)
        text = f"[dim]{escape(row['expression'])}[/]"
        end = row.get("to_the_end", {}).get("short", "")
        table.add_row(*((name, words, end, text) if roomy else (name, f"{words}\n{text}", end)))
    out.print(table)
    out.print(
        "\n[dim]To the end: accuracy lost against dense in a whole training (docs/quality/end.md).\n"
        "gossamer recipes NAME explains one, or an expression; gossamer recipes --parts lists the parts.[/]"
    )


def list_workloads(rows: list[Card]) -> None:
    out = console()
    table = Table(box=None, pad_edge=False)
    for head in ("workload", "parameters", "what it is", "judged by", "shards by"):
        table.add_column(head, justify="right" if head == "parameters" else "left", no_wrap=head == "workload")
    for row in rows:
        better = "lower" if row["lower_is_better"] else "higher"
        size = "" if row["parameters"] is None else f"{row['parameters']:,}"
        metric = escape(f"{row['metric']}; {better} is better")
        table.add_row(f"[bold]{escape(row['name'])}[/]", size, summary(out, row), metric, escape(row["group"]))
    out.print(table)
    out.print("\n[dim]gossamer compare and gossamer train take one by --workload NAME; lm if nothing is said.[/]")


def summary(out: Console, row: Card) -> str:
    """Summary of a row, with its origin if it is not our own."""
    return prose(out, row["summary"]) + (f" [dim]({escape(row['origin'])})[/]" if "origin" in row else "")


def prose(out: Console, text: str) -> str:
    """Show code between backticks in colour on a terminal."""
    return re.sub(r"`([^`]+)`", r"[cyan]\1[/]", escape(text)) if out.is_terminal else escape(text)
