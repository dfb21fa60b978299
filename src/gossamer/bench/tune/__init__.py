"""Floor 8: which learning rate and which knobs are best for each recipe, searched with the same budget for all.

>>> from gossamer.bench.tune import SearchPlan, Search
>>> search = Search(SearchPlan({"ddp": "allreduce", "qsgd": "qsgd"}, "ridge", trials=2, steps=10, repeats=1))
>>> search.run(lambda tuning, trial: None)
>>> [len(search.tuning.searched(c.name)) for c in search.tuning.contenders], search.tuning.complete
([2, 2], True)
"""

from gossamer.bench.tune.ranking import Ranked, at_an_end, ranking
from gossamer.bench.tune.record import Candidate, Trial, Tuning, is_tuning
from gossamer.bench.tune.search import Search, SearchPlan
from gossamer.bench.tune.space import SearchOverride, TuningError

__all__ = [
    "Candidate",
    "Ranked",
    "Search",
    "SearchOverride",
    "SearchPlan",
    "Trial",
    "Tuning",
    "TuningError",
    "at_an_end",
    "is_tuning",
    "ranking",
]
