"""gossamer workloads: list the workloads."""

import json
from typing import Annotated

import typer

from gossamer.bench.cli import list_cache, list_tables
from gossamer.bench.cli.imports import Imports


def workloads(
    imports: Imports = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the workloads, with the size of each model and its quality metric."""
    rows = list_cache.workloads()
    print(json.dumps(rows, indent=1)) if as_json else list_tables.list_workloads(rows)
