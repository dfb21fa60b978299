"""Floor 1: real models on real data, small enough for two cores.

>>> from gossamer.bench import workloads
>>> lm = workloads.get("lm", seed=0)
>>> lm.metric
'held-out loss (nats/token)'
"""

from gossamer.bench.workloads.contract import Workload, find, get, names, workload
from gossamer.bench.workloads.convex import Logistic, Ridge
from gossamer.bench.workloads.errors import DataError, WorkloadError
from gossamer.bench.workloads.images import Digits, Fashion, FashionResNet
from gossamer.bench.workloads.python_source import PythonBytes, PythonLstm, PythonWords
from gossamer.bench.workloads.shards import Batch, Data
from gossamer.bench.workloads.translation import Translate, TranslateRnn
from gossamer.bench.workloads.wiki import WikiLm, WikiTopics

__all__ = [
    "Batch",
    "Data",
    "DataError",
    "Digits",
    "Fashion",
    "FashionResNet",
    "Logistic",
    "PythonBytes",
    "PythonLstm",
    "PythonWords",
    "Ridge",
    "Translate",
    "TranslateRnn",
    "WikiLm",
    "WikiTopics",
    "Workload",
    "WorkloadError",
    "find",
    "get",
    "names",
    "workload",
]
