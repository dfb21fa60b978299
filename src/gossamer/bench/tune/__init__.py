"""Floor 8: which learning rate and which knobs are best for each recipe, searched with the same budget for all.

>>> from gossamer.bench.tune import Question, Search
>>> search = Search(Question({"ddp": "allreduce", "qsgd": "qsgd"}, "ridge", trials=2, steps=10, repeats=1))
>>> search.run(lambda tuning, trial: None)
>>> [len(search.tuning.searched(c.name)) for c in search.tuning.contenders], search.tuning.complete
([2, 2], True)
"""

from gossamer.bench.tune.errors import TuningError
from gossamer.bench.tune.record import Contender, Trial, Tuning, is_tuning
from gossamer.bench.tune.search import Question, Search
from gossamer.bench.tune.space import Wish
from gossamer.bench.tune.standings import Standing, at_an_end, standings

__all__ = [
    "Contender",
    "Question",
    "Search",
    "Standing",
    "Trial",
    "Tuning",
    "TuningError",
    "Wish",
    "at_an_end",
    "is_tuning",
    "standings",
]
