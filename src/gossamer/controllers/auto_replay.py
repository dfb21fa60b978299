"""The words of `auto` in a ledger, and how a later run reads its decisions from them."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from gossamer.core.errors import RecipeError
from gossamer.core.parts import require
from gossamer.core.version import __version__

DENSE = "dense"
CHANGE = re.compile(r"auto(?: tries|:) (.+?) from step (\d+)\b")
HEAD = re.compile(r"auto begins: model ([0-9a-f]{8}), (\d+) ranks, gossamer (\S+)\.")


class RecordedRun(NamedTuple):
    """What a ledger says of a run under `auto`."""

    model: str
    size: int
    changes: Mapping[int, str]  # what came into force, by step


def model_of(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """A hash of all parameters' names and whole shapes, however they are cut into blocks and shards."""
    said = sorted(f"{name} {tuple(shape)}" for name, shape in shapes.items())
    return f"{crc32(' '.join(said).encode()):08x}"


def head(shapes: Mapping[str, tuple[int, ...]], size: int) -> str:
    """What a run says first."""
    return f"auto begins: model {model_of(shapes)}, {size} ranks, gossamer {__version__}."


def read_run(path: str, known: Iterable[str]) -> RecordedRun:
    """Read a ledger that a run under `auto` has written."""
    try:
        lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        made = "give the file that comm.ledger.write(path) has made"
        raise RecipeError(f"auto: replay={path!r} cannot be read: {why}; {made}") from None
    words = [line["decision"] for line in lines if isinstance(line, dict) and isinstance(line.get("decision"), str)]
    begins = [found for word in words if (found := HEAD.match(word))]
    require(
        bool(begins),
        f"auto: replay={path!r} holds no run under auto: give the ledger of one, written by comm.ledger.write(path)",
    )
    model, size, version = begins[0].groups()
    require(
        version == __version__,
        f"auto: replay={path!r} was written by gossamer {version}, and this is {__version__}, whose numbers may differ: replay it "
        f"with gossamer {version}, or leave replay out and measure anew",
    )
    changes = {int(found[2]): found[1] for word in words if (found := CHANGE.match(word))}
    strange = sorted(set(changes.values()) - {DENSE, *known})
    require(
        not strange,
        f"auto: replay={path!r} put {', '.join(strange)} in force, which `allow` does not name: add it there",
    )
    return RecordedRun(model, int(size), changes)
