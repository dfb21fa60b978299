"""Rows of `gossamer recipes` and `gossamer workloads`, without loading torch.

Loading recipes loads torch, which takes seconds. So our own rows are stored in `list_cache.json`, which
`python -m gossamer.bench.cli.list_cache` writes and a test checks. The file is not used where the user's own modules may
have registered more, nor where the sources have names that it lacks.
"""

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from gossamer.core import plugins

ListRow = dict[str, Any]
FILE = Path(__file__).with_name("list_cache.json")
VERDICTS = Path(__file__).with_name("end_verdicts.json")  # `python -m benchmarks.to_the_end table` writes it
HOUSE = FILE.parents[2]
SOURCES = {"recipes": HOUSE / "recipes", "workloads": HOUSE / "bench" / "workloads"}
# A module that registers a recipe or a workload has imported this.
HOMES = {"recipes": "gossamer.recipe", "workloads": "gossamer.bench.workloads"}


def presets() -> list[ListRow]:
    """One row per preset, in the order of `gossamer.recipes`."""
    rows = _written("recipes", r"^@preset\ndef (\w+)") or _presets()
    return [{**row, **to_the_end(row["name"])} for row in rows]


def to_the_end(name: str) -> ListRow:
    """What a preset with its defaults lost against dense, trained to the end; empty if it has not been trained so."""
    verdict = _verdicts().get(name)
    return {} if verdict is None else {"to_the_end": verdict}


@cache
def _verdicts() -> dict[str, ListRow]:
    return json.loads(VERDICTS.read_text(encoding="utf-8"))


def workloads() -> list[ListRow]:
    """One row per workload, by name."""
    return _written("workloads", r'^@workload\("([^"]+)"') or _workloads()


def write() -> None:
    """Write `list_cache.json`, one row per line."""
    made = {"recipes": _presets(), "workloads": _workloads()}
    lists = (f'"{kind}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]" for kind, rows in made.items())
    FILE.write_text("{\n" + ",\n".join(lists) + "\n}\n", encoding="utf-8")


def _written(kind: str, registering: str) -> list[ListRow]:
    plugins.load_plugins()
    if HOMES[kind] in sys.modules:  # the user may have registered more
        return []
    sources = (path.read_text(encoding="utf-8") for path in SOURCES[kind].glob("*.py"))
    there = {name for text in sources for name in re.findall(registering, text, re.MULTILINE)}
    rows: list[ListRow] = json.loads(FILE.read_text(encoding="utf-8"))[kind]
    return rows if {row["name"] for row in rows} == there else []


def _presets() -> list[ListRow]:
    from gossamer import recipes
    from gossamer.bench import catalogue

    return [
        {"name": name, "expression": repr(catalogue.example(name)), **origin(make), **words(make)}
        for name, make in recipes.presets().items()
    ]


def _workloads() -> list[ListRow]:
    from gossamer.bench.workloads import find, names

    return [_workload(find(name)) for name in names()]


def _workload(kind: Any) -> ListRow:
    facts = {word: getattr(kind, word) for word in ("name", "summary", "metric", "lower_is_better", "group")}
    return {**facts, **origin(kind), "parameters": _size(kind)}


def _size(kind: Any) -> int | None:
    """Number of parameters of the model; None if it cannot be made here, such as without its data."""
    try:
        return sum(p.numel() for p in kind().model().parameters())
    except Exception:  # user code may raise anything
        return None


def origin(made: Any) -> dict[str, str]:
    """Where a registered object comes from; empty for our own."""
    found = plugins.origin(made.__module__)
    return {"origin": found} if found else {}


def words(subject: Any) -> dict[str, str]:
    """Summary and sections of the docstring of a part or a preset."""
    from gossamer.bench import catalogue

    docs = catalogue.read(subject) if subject is not None else catalogue.Docs("", [])
    said = ("summary", "use", "not_for", "wire", "paper")
    return {word: getattr(docs, word) for word in said if word != "wire" or isinstance(subject, type)}


if __name__ == "__main__":
    write()
