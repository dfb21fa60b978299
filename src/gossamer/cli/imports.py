"""--import: modules of somebody's own, whose parts, presets and workloads a command may then name."""

from pathlib import Path
from typing import Annotated

import typer

from gossamer.core import plugins

_brought = dict[str, None]()  # in the order they were asked for


def bring(said: list[str] | None) -> list[str] | None:
    """Import what was asked for, before anything else is read; what it brings must be something."""
    for each in said or []:
        name = str(Path(each).absolute()) if each.endswith(".py") else each
        if name in _brought:
            continue
        before = _known()
        plugins.import_named(name)
        if _known() == before:
            raise plugins.ImportingError(
                f"{each} brings nothing: no part, no preset and no workload is registered by it; put @part(...), @preset or "
                "@workload(...) above what is meant"
            )
        _brought[name] = None
    return said


def brought() -> list[str]:
    """What ranks, which are processes of their own, must import as well."""
    return list(_brought)


def _known() -> int:
    from gossamer import workloads  # all three need torch, and most commands bring nothing
    from gossamer.core.parts import registry
    from gossamer.recipes import presets

    return len(registry.of()) + len(presets()) + len(workloads.names())


Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        help="A module or a file with parts or workloads of your own. May be repeated.",
        callback=bring,
        is_eager=True,
    ),
]
