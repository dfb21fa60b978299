"""gossamer recipes and gossamer workloads: list recipes, parts and workloads, or explain a recipe or a part."""

import json
from typing import Annotated

import typer

from gossamer.bench.cli import list_cache, list_tables
from gossamer.bench.cli.errors import InputError
from gossamer.bench.cli.imports import Imports


def recipes(
    name: Annotated[str | None, typer.Argument(help="A preset, an expression, a TOML file or a part.")] = None,
    parts: Annotated[bool, typer.Option("--parts", help="List or explain parts instead of presets.")] = False,
    workload: Annotated[
        str | None, typer.Option(help="Count bytes for this workload's model; 'lm' by default.")
    ] = None,
    parameters: Annotated[
        int | None, typer.Option(min=4, max=10**12, help="Count bytes for this many parameters, in square matrices.")
    ] = None,
    hosts: Annotated[
        int | None, typer.Option(min=2, max=10_000, help="Count bytes for this many ranks; 4 by default.")
    ] = None,
    rate: Annotated[str | None, typer.Option(help="Say how long they take on links of this rate: '200mbit'.")] = None,
    imports: Imports = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List recipes or parts, or explain one: what it is made of and sends, when to use it, and what it refuses."""
    asked = {"--workload": workload, "--parameters": parameters, "--hosts": hosts, "--rate": rate}
    if name is None and (given := [word for word, value in asked.items() if value is not None]):
        raise InputError(
            f"{given[0]} counts the bytes of one recipe: name it, as in 'gossamer recipes qsgd {given[0]} ...'"
        )
    if name is None and not parts:
        rows = list_cache.presets()
        print(json.dumps(rows, indent=1)) if as_json else list_tables.list_presets(rows)
        return
    from gossamer.bench.cli import parts as explained  # it needs torch

    if name is None:
        explained.list_parts(as_json)
        return
    subject = explained.subject(name, parts)
    explained.show(name, subject, explained.query(workload, parameters, hosts or 4, rate), as_json)


def workloads(
    imports: Imports = None, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """List the workloads, with the size of each model and its quality metric."""
    rows = list_cache.workloads()
    print(json.dumps(rows, indent=1)) if as_json else list_tables.list_workloads(rows)
