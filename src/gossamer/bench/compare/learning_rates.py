"""Parse --lr: factors on the workload's learning rate, for all runs or for one."""

import math
from collections.abc import Iterable, Sequence

from gossamer.core.errors import RecipeError
from gossamer.core.parts import nearest


def rates_of(texts: Sequence[str], names: Iterable[str]) -> dict[str, float]:
    """Factor on the learning rate of each run: 'FACTOR' is for all, 'RECIPE=FACTOR' for one.

    >>> rates_of(["2", "topk(ratio=0.1)=1.3"], ["ddp", "topk(ratio=0.1)"])
    {'ddp': 2.0, 'topk(ratio=0.1)': 1.3}
    """
    known = list(names)
    said = dict[str, float]()
    for text in texts:
        name, _, number = text.rpartition("=")
        name = name.strip()
        if name and name not in known:
            raise RecipeError(
                f"--lr {text.strip()[:80]}: no recipe here is called {name[:60]!r}. {nearest(name, known)}"
            )
        if name in said:
            raise RecipeError(f"--lr gives {name or 'all recipes'} two factors: give one")
        said[name] = _factor(number, text)
    return {name: said.get(name, said.get("", 1.0)) for name in known} if said else {}


def _factor(number: str, text: str) -> float:
    try:
        found = float(number)
    except ValueError:
        found = math.nan
    if not (math.isfinite(found) and found > 0):
        raise RecipeError(
            "--lr takes a factor above 0 on the workload's learning rate, or RECIPE=FACTOR, such as '1.3' or 'topk=1.3', "
            f"not {text.strip()[:60]!r}"
        )
    return found
