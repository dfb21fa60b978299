"""Help pages of `gossamer recipes`: one recipe, one part, or the list of parts."""

from collections.abc import Iterable
from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from gossamer.bench.catalogue import KINDS, formulas
from gossamer.bench.cli.console import console
from gossamer.bench.cli.list_tables import Card, prose, summary
from gossamer.bench.lab import format_rate
from gossamer.bench.report.formatting import rate, seconds, size
from gossamer.core.text import listed
from gossamer.costs.quantities import say_parameters


def list_parts(rows: list[Card]) -> None:
    out, known = console(), [*KINDS]
    width = max(len(row["name"]) for row in rows)
    rows = sorted(rows, key=lambda row: (known.index(row["kind"]) if row["kind"] in known else len(known), row["name"]))
    for kind, members in groupby(rows, key=lambda row: row["kind"]):
        plural, what = KINDS.get(kind, (f"{kind}s", ""))
        out.print(f"[bold]{plural.capitalize()}[/]" + (f"[dim]: {what}[/]" if what else ""))
        table = _grid(width)
        for row in members:
            table.add_row(row["name"], summary(out, row))
        _padded(out, table, 2)
        out.print()
    out.print("[dim]gossamer recipes NAME explains one; add --parts where a recipe has the same name.[/]")


def show_recipe(card: Card) -> None:
    out = console()
    _head(out, card)
    _section(out, "Made of")
    for part in card["parts"]:
        out.print(f"  [cyan]{escape(part['text'])}[/] [dim]{part['kind']}[/]")
        _padded(out, prose(out, part["summary"]))
        if part["wire"]:
            _padded(out, f"[dim]on the wire:[/] {prose(out, part['wire'])}")
    _sent(out, card, [(card["name"], card)])
    if end := card.get("to_the_end"):
        _section(out, "Trained to the end", end["on"])
        _padded(out, escape(end["text"]), 2)
    _refused(out, card, f"{card['name']} + ")


def show_part(card: Card) -> None:
    out = console()
    _head(out, card)
    _details(out, card["details"])
    if card["wire"]:
        _section(out, "On the wire")
        _padded(out, prose(out, card["wire"]), 2)
    if card["recipes"]:
        _sent(out, card, [(r["expression"], r) for r in card["recipes"]])
    _refused(out, card, "")
    if card["presets"]:
        _section(out, "In the recipes")
        _padded(out, listed(card["presets"]), 2)


def _head(out: Console, card: Card) -> None:
    name, _, arguments = (card["signature"] or card["name"]).partition("(")
    out.print(f"[bold]{escape(name)}[/]" + (f"[dim]({escape(arguments)}[/]" if arguments else ""))
    if card["summary"]:
        out.print(prose(out, card["summary"]))
    out.print(f"[cyan]{escape(card['expression'])}[/]" + (f" [dim]{card['kind']}[/]" if "kind" in card else ""))
    if card["paper"]:
        out.print(f"[dim]Paper: {escape(card['paper'])}[/]")
    words = _grid(len("not for"))
    for label, colour, text in (("use", "green", card["use"]), ("not for", "red", card["not_for"])):
        if text:
            words.add_row(f"[bold {colour}]{label}[/]", prose(out, text))
    if words.rows:
        out.print()
        out.print(words)


def _details(out: Console, paragraphs: list[str]) -> None:
    for text in paragraphs:
        lines, words = formulas(text)
        out.print()
        for line in lines:
            _padded(out, f"[magenta]{escape(line)}[/]", 2)
        if words:
            out.print(prose(out, words))


def _sent(out: Console, card: Card, rows: list[tuple[str, Card]]) -> None:
    """Print bytes per step of recipes, with a dense all-reduce for comparison."""
    asked = f"{card['model']}, {say_parameters(card['parameters'])}, {card['hosts']} ranks; per step, on average"
    _section(out, "Sends", asked)
    link = [f"at {rate(format_rate(card['rate']))}"] if card["rate"] else []
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("", overflow="fold")
    for head in ("a rank", "all ranks", *link, "bytes"):
        table.add_column(head, justify="right", no_wrap=True)
    dense = {"sent_bytes_per_step": card["dense_bytes_per_step"], "seconds_per_step": card["dense_seconds_per_step"]}
    for name, row in (*rows, ("a dense all-reduce", {**dense, "ratio_to_dense": None})):
        sent = row["sent_bytes_per_step"]
        time = [f"≥ {seconds(row['seconds_per_step'])}"] if link else []
        table.add_row(escape(name), size(sent), size(sent * card["hosts"]), *time, _ratio(row["ratio_to_dense"]))
    _padded(out, table, 2)
    for _, row in rows:
        if row["card_bytes_per_step"] is not None:
            _padded(out, f"through the card of a node: {size(row['card_bytes_per_step'])}", 2)
        if row["busy_up_to"] is not None and len(rows) == 1:
            _padded(
                out, f"{row['busy_up_to']} [dim](S: seconds to send the model over those of a step's computing)[/]", 2
            )
    if link:
        _padded(
            out,
            "[dim]≥: time of the bytes alone. Latency, encoding and waiting add to it; backward may hide some of it.[/]",
            2,
        )


def _ratio(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:.3g} x fewer" if ratio > 1 else f"{1 / ratio:.3g} x more" if ratio < 1 else "as many"


def _refused(out: Console, card: Card, start: str) -> None:
    if not card["refuses"] and not card["limits"]:
        return
    _section(out, "Refuses")
    for texts, message in _families(card["refuses"], start):
        out.print(f"  [yellow]{escape(listed(texts))}[/]")
        _padded(out, prose(out, message))
    if card["limits"]:
        out.print("  [yellow]arguments out of range[/]")
        for message in card["limits"]:
            _padded(out, prose(out, message))


def _families(refusals: list[Card], start: str) -> Iterable[tuple[list[str], str]]:
    """Group refusals that differ only in the part they name."""
    found = dict[str, tuple[list[str], str]]()
    for r in refusals:
        partner = r["text"].removeprefix(start) if start and r["text"].startswith(start) else ""
        text = f"+ {partner}" if partner else r["text"]
        key = r["message"].replace(partner, "") if partner else r["message"]
        texts, _ = found.setdefault(key, ([], r["message"].removeprefix(f"{r['text']}: ")))
        texts.append(text)
    return found.values()


def _section(out: Console, title: str, aside: str = "") -> None:
    out.print(f"\n[bold]{title}[/]" + (f"  [dim]{escape(aside)}[/]" if aside else ""))


def _padded(out: Console, shown: str | Table, left: int = 4) -> None:
    out.print(Padding(shown, (0, 0, 0, left), expand=False))


def _grid(width: int) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=width, no_wrap=True)
    table.add_column()
    return table
