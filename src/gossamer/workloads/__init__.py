"""Floor 1: real models on real data, small enough for two cores.

>>> from gossamer import workloads
>>> lm = workloads.get("lm", seed=0)
>>> lm.metric
'held-out loss (nats/token)'
"""

from gossamer.workloads.contract import Workload, find, get, names, workload
from gossamer.workloads.convex import Logistic, Ridge
from gossamer.workloads.errors import DataError, WorkloadError
from gossamer.workloads.images import Digits, Fashion, FashionResNet
from gossamer.workloads.python_source import PythonBytes, PythonLstm, PythonWords
from gossamer.workloads.shards import Batch, Data
from gossamer.workloads.translation import Translate, TranslateRnn
from gossamer.workloads.wiki import WikiLm, WikiTopics

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
