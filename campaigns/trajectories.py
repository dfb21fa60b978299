"""Before and after: do all recipes train bit for bit as they did?

    python -m campaigns.trajectories save FILE      with the old code
    python -m campaigns.trajectories check FILE     with the new code, on the same machine

Every recipe of the laws' fleet, and all presets, train the awkward model of the tests on 1, 3 and 4 simulated ranks. After
every step the bits of all parameters are hashed, and at the end the bytes that all sent and the checkpoint that each rank
writes. Processors round some sums otherwise, so a file means nothing on another one, and none is kept here.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tests.laws.samples import preset_recipes
from tests.runtime import fleet
from tests.runtime.gym import make, on_all, parameters, pull, train
from torch import Tensor

from gossamer.checkpoints import state as checkpoint
from gossamer.core.errors import AttachError, RecipeError
from gossamer.recipe import Recipe
from gossamer.runtime import Worker

SIZES, STEPS = (1, 3, 4), 9


def digest(values: Iterable[Any]) -> str:
    """Tensors by their bits, all else as it prints."""
    out = hashlib.sha256()
    for value in values:
        raw = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if isinstance(value, Tensor) else None
        out.update(repr(value).encode() if raw is None else raw)
    return out.hexdigest()[:16]


def items(saved: Mapping[str, Any]) -> list[Any]:
    """What a checkpoint says of numbers, whatever version wrote it."""
    return [x for key in sorted(saved) if isinstance(saved[key], Tensor) for x in (key, saved[key])]


def run(recipe: "str | Recipe", size: int) -> dict[str, Any]:
    ranks = make(recipe, size)
    models, sent = list[str](), 0
    for _ in range(STEPS):
        sent += train(ranks, pull, 1).ledger.sent
        models.append(digest(parameters(ranks)))
    on_all(ranks, Worker.quiesce)
    return {"models": models, "sent": sent, "checkpoint": digest(items_of_all(ranks))}


def items_of_all(ranks: Any) -> list[Any]:
    return [x for r in ranks for x in items(checkpoint.save(r.worker))]


def everything(known: Iterable[str] = ()) -> dict[str, Any]:
    torch.set_num_threads(1)
    recipes = dict.fromkeys([*known, *fleet.ALL, *map(repr, preset_recipes().values())])
    found = dict[str, Any]()
    for recipe in recipes:
        for size in SIZES:
            try:
                found[f"{recipe} on {size}"] = run(recipe, size)
            except (RecipeError, AttachError) as refusal:
                found[f"{recipe} on {size}"] = str(refusal)
    return found


def main(how: str, file: str) -> int:
    before: dict[str, Any] = json.loads(Path(file).read_text()) if how == "check" else {}
    found = everything(name.rpartition(" on ")[0] for name in before)
    if how == "save":
        Path(file).write_text(json.dumps(found, indent=1))
        print(f"{len(found)} runs of {STEPS} steps kept")
        return 0
    wrong = [name for name in before if found.get(name) != before[name]]
    for name in wrong:
        then, now = before[name], found.get(name, "not run")
        parts = [k for k in then if then[k] != now[k]] if isinstance(then, dict) and isinstance(now, dict) else [now]
        print(f"{name}: another {', '.join(map(str, parts))}")
    print(f"{len(before)} runs, {len(wrong)} differ, {len(found.keys() - before.keys())} are new")
    return min(len(wrong), 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
