"""Floor 1: real models on real data, small enough for two cores.

>>> from gossamer import workloads
>>> lm = workloads.get("lm", seed=0)
>>> lm.metric
'held-out loss (nats/token)'
"""

from gossamer.workloads.errors import DataError, WorkloadError
from gossamer.workloads.python_source import PythonBytes, PythonWords
from gossamer.workloads.shards import Batch, Data
from gossamer.workloads.workload import Workload, find, get, names

__all__ = [
    "Batch",
    "Data",
    "DataError",
    "PythonBytes",
    "PythonWords",
    "Workload",
    "WorkloadError",
    "find",
    "get",
    "names",
]
