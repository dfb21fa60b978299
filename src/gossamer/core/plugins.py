"""What others wrote: a module that somebody names, and installed packages that say in their metadata that they have parts.

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
origins: dict[str, str] = {}  # of modules that a package offers: its name


class ImportingError(GossamerError, ValueError):
    """What somebody named cannot be imported, or brings nothing."""


def import_named(said: str) -> None:
    """Import a module by its name, or a file by its path. The error names the line of it that failed."""
    try:
        if said.endswith(".py"):
            _run_file(Path(said))
            return
        if os.getcwd() not in sys.path:  # as `python -m` has it
            sys.path.insert(0, os.getcwd())
        importlib.import_module(said)
    except Exception as error:  # of code that is not ours: whatever it raises
        raise ImportingError(f"{said} cannot be imported: {_told(error)}") from None


def _run_file(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError("there is no such file")
    name = path.stem if path.stem not in sys.modules else f"gossamer_imported_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent.absolute()))  # for what lies beside it
    spec.loader.exec_module(module)


def _told(error: Exception) -> str:
    """What was raised, and where in the code that is not ours."""
    where = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(("<frozen", HOUSE))]
    place = f" ({where[-1].filename}, line {where[-1].lineno})" if where else ""
    return cut(f"{type(error).__name__}: {error}{place}", 600)


@cache
def load_plugins() -> bool:
    """Import what installed packages offer, once; returns whether there was anything. A broken one is a warning."""
    found = list(entry_points(group=GROUP))
    for offer in found:
        origins[offer.module] = _owner(offer)
        try:
            offer.load()
        except Exception as error:
            said = f"{_owner(offer)} offers {offer.value} to gossamer, and it cannot be loaded: {_told(error)}"
            warnings.warn(said, RuntimeWarning, stacklevel=2)
    return bool(found)


def _owner(offer: EntryPoint) -> str:
    return offer.dist.name if offer.dist is not None else offer.module


def origin(module: str) -> str:
    """Where a part comes from: nothing if it is the house's own, else the package that offers it, or its module.

    >>> origin("gossamer.codecs.qsgd"), origin("my_parts")
    ('', 'my_parts')
    """
    if module == "gossamer" or module.startswith("gossamer."):
        return ""
    return next((owner for name, owner in origins.items() if (module + ".").startswith(name + ".")), module)
