"""--import: load the user's own modules, whose parts, presets and workloads a command may then name."""

from pathlib import Path
from typing import Annotated

import typer

from gossamer.core import plugins

_brought = dict[str, None]()  # in the order of the options


def bring(said: list[str] | None) -> list[str] | None:
    """Import the named modules before other options are read; each must register something."""
    for each in said or []:
        name = str(Path(each).absolute()) if each.endswith(".py") else each
        if name in _brought:
            continue
        before = _known()
        plugins.import_named(name)
        if _known() == before:
            raise plugins.ImportingError(
                f"{each} registers no part, no preset and no workload: put @part(...), @preset or @workload(...) above "
                "the class or function"
            )
        _brought[name] = None
    return said


def brought() -> list[str]:
    """Modules that ranks, which are separate processes, must import too."""
    return list(_brought)


def _known() -> int:
    from gossamer.bench import workloads  # all three need torch, and most commands import nothing
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
