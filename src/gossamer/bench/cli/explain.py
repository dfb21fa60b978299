"""gossamer explain: show every number of a few steps of a recipe."""

from pathlib import Path
from typing import Annotated

import typer

from gossamer.bench.cli.errors import InputError
from gossamer.bench.cli.imports import Imports
from gossamer.bench.cli.output import Force, writing


def explain(
    recipe: Annotated[str, typer.Argument(help="A preset, an expression, or a TOML file.")],
    ranks: Annotated[
        int | None, typer.Option(min=2, max=16, help="How many virtual ranks; three, or four for who meets in pairs.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=50, help="Steps in which something is said.")] = 2,
    out: Annotated[Path | None, typer.Option(help="A page to write it to, such as page.html.")] = None,
    imports: Imports = None,
    force: Force = False,
) -> None:
    """Follow a recipe by hand: its messages, their bytes and the state of every rank, on a few ranks with a tiny model.

    Gradients are made up. Steps without messages take one line.
    """
    from gossamer.bench.cli import parts  # it needs torch
    from gossamer.bench.explain import as_text, explain
    from gossamer.bench.report import explained
    from gossamer.bench.report.pages import PAGE
    from gossamer.core import files
    from gossamer.core.errors import AttachError
    from gossamer.recipe import Recipe

    meant = parts.subject(recipe)
    if not isinstance(meant, Recipe):
        raise InputError(f"{recipe!r} is a part, not a recipe: 'gossamer recipes {recipe}' says what it is for")
    if out is not None:
        with writing(out):
            files.writable(out, PAGE, force)
    try:
        told = explain(meant, ranks, steps)
    except AttachError as error:
        raise InputError(str(error)) from None
    if out is None:
        print(as_text(told), end="")
        return
    with writing(out):
        explained.write_html(told, recipe, out, force)
    print(out)
