"""Claims of papers, each tried once by a rule that was fixed before: `gossamer claims`.

To write one, add a file to `papers/`, of at most 120 lines, that ends with `CLAIM = PaperClaim(...)`:

- `statements`: what the paper says, the rule in words, what you expect, and a `judge`: a function of the `Evidence` (the
  judged runs, by study, case, row and seed) which returns a `Judgement`. The functions of `verdict` make those:
  `no_worse`, `better`, `times` for differences paired by seed; `within`, `slope_within` for theory; `all_of`, `counted`
  for several conditions. A statement that cannot be judged yet has `waits="..."` in place of a judge.
- `plan`: by name, a `Contest` (recipes that train a workload, each tuned with as many trials, judged on seeds 30 to 34)
  or a `Study` (a function of yours, `measure(seed, **settings)`, that returns named rows of numbers, for each case).
  Settings are plain values, since the hash of the plan is of them; what `--quick` makes smaller is in `quick`.
- `figures`: lines as data, from the evidence; `methods`: modules that a study uses: they and what they import make it stale.

Seconds are virtual: `clocks` has laws of computing, a network, and the band in which the planner is believed; a statement of
time holds only where it does in the whole band (`verdict.banded`).

Pilots use seeds 0 to 2 only. Commit the plan, then run it once: `gossamer claims NAME`. A rule is not changed afterwards;
a plan that changes in anything has another hash, and the old verdict stays in the record. A claim may grow: give a statement
that waits its rule, judge and study, leave all others as they are, and the same command runs only what is new. A control that no recipe offers
is a part in the claim's own file.

>>> [name for name in names() if name == "woodworth"]
['woodworth']
"""

from importlib import import_module
from pkgutil import iter_modules

from gossamer.bench.claims import papers
from gossamer.bench.claims.claim import ClaimError, PaperClaim
from gossamer.bench.claims.claim import PaperStatement as Statement
from gossamer.bench.claims.evidence import ClaimFigure as Figure
from gossamer.bench.claims.evidence import ClaimRun, Evidence, Line, Rows, mean
from gossamer.bench.claims.plan import DEAR, JUDGED, Contest
from gossamer.bench.claims.plan import ClaimStudy as Study
from gossamer.bench.claims.record import ClaimRecord
from gossamer.bench.claims.running import begun, confirm, empty, hash_of, quick, run_claim
from gossamer.bench.claims.sources import sources
from gossamer.core.parts import nearest


def names() -> list[str]:
    """All claims."""
    return sorted(each.name for each in iter_modules(papers.__path__))


def find(name: str) -> PaperClaim:
    """A claim by name."""
    if name not in names():
        raise ClaimError(f"there is no claim called {name!r}. {nearest(name, names())}")
    return import_module(f"{papers.__name__}.{name}").CLAIM


__all__ = [
    "DEAR",
    "JUDGED",
    "ClaimError",
    "ClaimRecord",
    "ClaimRun",
    "Contest",
    "Evidence",
    "Figure",
    "Line",
    "PaperClaim",
    "Rows",
    "Statement",
    "Study",
    "begun",
    "confirm",
    "empty",
    "find",
    "hash_of",
    "mean",
    "names",
    "quick",
    "run_claim",
    "sources",
]
