"""Loads parts of third parties: modules that the user names, and installed packages with a `gossamer.parts` entry point.

A package offers a module that registers parts, presets or workloads by an entry point of the group `gossamer.parts`.
"""

import importlib
import importlib.util
import os
import sys
import traceback
import warnings
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from gossamer.core.errors import GossamerError
from gossamer.core.text import cut

GROUP = "gossamer.parts"
HOUSE = str(Path(__file__).parents[1])
origins: dict[str, str] = {}  # module name -> name of the package that offers it


class ImportingError(GossamerError, ValueError):
    """A module or file that the user named cannot be imported, or registers nothing."""


def import_named(said: str) -> None:
    """Import a module by its name, or a file by its path. The error names the line of it that failed."""
    try:
        if said.endswith(".py"):
            _run_file(Path(said))
            return
        see_this_folder()
        importlib.import_module(said)
    except (Exception, SystemExit) as error:  # third-party code may raise anything
        raise ImportingError(f"{said} cannot be imported: {_told(error)}") from None


def see_this_folder() -> None:
    """Let modules of the folder that we are in be imported, as `python -m` does and an installed command does not."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _run_file(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError("there is no such file")
    name = path.stem if path.stem not in sys.modules else f"gossamer_imported_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent.absolute()))  # so that it can import its neighbours
    spec.loader.exec_module(module)


def _told(error: BaseException) -> str:
    """The exception raised, and its location in the third-party code."""
    where = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(("<frozen", HOUSE))]
    place = f" ({where[-1].filename}, line {where[-1].lineno})" if where else ""
    return cut(f"{type(error).__name__}: {error}{place}", 600)


@cache
def load_plugins() -> bool:
    """Import the modules that installed packages offer, once; returns True if any were. One that fails gives a warning."""
    found = list(entry_points(group=GROUP))
    for offer in found:
        origins[offer.module] = _owner(offer)
        try:
            offer.load()
        except Exception as error:
            said = f"{_owner(offer)} offers {offer.value} to gossamer, which cannot be loaded: {_told(error)}"
            warnings.warn(said, RuntimeWarning, stacklevel=2)
    return bool(found)


def _owner(offer: EntryPoint) -> str:
    return offer.dist.name if offer.dist is not None else offer.module


def origin(module: str) -> str:
    """The package or module that a part comes from; empty for gossamer's own parts.

    >>> origin("gossamer.codecs.qsgd"), origin("my_parts")
    ('', 'my_parts')
    """
    if module == "gossamer" or module.startswith("gossamer."):
        return ""
    return next((owner for name, owner in origins.items() if (module + ".").startswith(name + ".")), module)
