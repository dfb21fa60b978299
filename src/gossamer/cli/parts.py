"""gossamer recipes: what there is, and what one of them is made of."""

import inspect
import json
import re
from dataclasses import fields
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from gossamer.cli.console import console
from gossamer.core.errors import RecipeError
from gossamer.core.parts import Part
from gossamer.recipe import Recipe
from gossamer.recipes import presets
from gossamer.simulate import bytes_per_step
from gossamer.trial.contender import check
from gossamer.trial.yardsticks import YARDSTICKS

SAMPLE_EPOCH = 100  # some recipes must know how many steps an epoch has


def recipes(
    name: Annotated[str | None, typer.Argument(help="A preset or an expression to explain.")] = None,
    parameters: Annotated[int, typer.Option(min=4, help="For bytes: how many parameters the model has.")] = 5_800_000,
    hosts: Annotated[int, typer.Option(min=2, help="For bytes: how many ranks.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """List the recipes, or explain one: its parts, its paper, and what crosses the wire."""
    if name is None:
        rows = [_row(n) for n in presets()]
        print(json.dumps(rows, indent=1)) if as_json else _print_all(rows)
        return
    facts = explain(name, parameters, hosts)
    print(json.dumps(facts, indent=1)) if as_json else _print_one(facts)


def _row(name: str) -> dict[str, str]:
    preset = presets()[name]
    summary, paper = _split(inspect.getdoc(preset) or "")
    return {"name": name, "expression": repr(_example(name)), "paper": paper, "summary": summary}


def _example(name: str) -> Recipe:
    preset = presets()[name]
    needs_epoch = inspect.signature(preset).parameters.get("epoch")
    return preset(epoch=SAMPLE_EPOCH) if needs_epoch else preset()


def _split(doc: str) -> tuple[str, str]:
    """The first paragraph, and what follows 'Paper:'."""
    paper = re.search(r"Paper:\s*(.*)", doc, re.S)
    return " ".join(doc.split("\n\n", maxsplit=1)[0].split()), " ".join(paper.group(1).split()) if paper else ""


def explain(text: str, parameters: int, hosts: int) -> dict[str, Any]:
    """Everything there is to say about a recipe, as data."""
    if text in YARDSTICKS:
        raise RecipeError(f"{text!r} is a yardstick, not a recipe: 'gossamer compare' trains it beside others")
    if text not in presets():
        check(text)
    recipe = _example(text) if text in presets() else Recipe.of(text)
    side = max(int((parameters / 4) ** 0.5), 1)
    shapes = {f"matrix{i}": (side, side) for i in range(4)}
    dense = 2 * (hosts - 1) * 4 * 4 * side * side // hosts
    sent = bytes_per_step(recipe, shapes, hosts)
    return {
        "name": text,
        "expression": repr(recipe),
        "summary": _row(text)["summary"] if text in presets() else "",
        "paper": _row(text)["paper"] if text in presets() else "",
        "parts": [_part(p) for p in _parts(recipe)],
        "hosts": hosts,
        "parameters": 4 * side * side,
        "sent_bytes_per_step": round(sent),
        "ratio_to_dense": round(dense / sent, 2) if sent else None,
    }


def _parts(recipe: Recipe) -> list[Part]:
    found = list[Part]()

    def walk(part: Any) -> None:
        if isinstance(part, Part):
            found.append(part)
            for f in fields(part):  # pyright: ignore[reportArgumentType]
                walk(getattr(part, f.name))

    for f in fields(recipe):
        value = getattr(recipe, f.name)
        for part in value if isinstance(value, tuple) else (value,):
            walk(part)
    return list(dict.fromkeys(found))


def _part(part: Part) -> dict[str, str]:
    doc = inspect.getdoc(type(part)) or ""
    wire = re.search(r"Wire:\s*(.*?)(?:\n\n|$)", doc, re.S)
    return {
        "kind": part.kind,
        "text": repr(part),
        "summary": _split(doc)[0],
        "wire": " ".join(wire.group(1).split()) if wire else "",
        "paper": _split(doc)[1],
    }


def _print_all(rows: list[dict[str, str]]) -> None:
    out = console()
    table = Table("recipe", "what it does", "as an expression", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(f"[bold]{row['name']}[/]", escape(row["summary"]), f"[dim]{escape(row['expression'])}[/]")
    out.print(table)
    out.print("\n[dim]gossamer recipes NAME explains one; an expression does as well.[/]")


def _print_one(facts: dict[str, Any]) -> None:
    out = console()
    shown = {k: escape(v) for k, v in facts.items() if isinstance(v, str)}
    out.print(f"[bold]{shown['name']}[/]  {shown['summary']}\n[dim]{shown['expression']}[/]")
    if shown["paper"]:
        out.print(f"[dim]{shown['paper']}[/]")
    for part in facts["parts"]:
        out.print(f"\n[bold]{escape(part['text'])}[/] [dim]({part['kind']})[/]\n  {escape(part['summary'])}")
        if part["wire"]:
            out.print(f"  [dim]wire:[/] {escape(part['wire'])}")
    mb, ratio = facts["sent_bytes_per_step"] / 1e6, facts["ratio_to_dense"]
    out.print(
        f"\n{facts['hosts']} ranks, {facts['parameters'] / 1e6:.1f} M parameters: {mb:.2f} MB sent by each rank and step"
        + (f", {ratio:g} times less than a dense all-reduce" if ratio else "")
    )
