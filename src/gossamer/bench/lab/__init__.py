"""Floor 1: a small network of slow hosts on one machine, made of kernel namespaces and shaped links.

>>> from gossamer.bench.lab import available, run_lab
>>> if available() is None:
...     result = run_lab(2, "200mbit", ["true"])
...     assert result.exit_code == 0
"""

from .access import available, privilege
from .command import name_rank, name_ranks, print_line, run_lab
from .counters import Counters, in_lab, lab_bytes, own_counters, read_counters
from .errors import LabError, LabInputError
from .owner import HostResult, LabResult, RankResult
from .rates import Link, format_rate, parse_latency, parse_link, parse_links, parse_rate

__all__ = [
    "Counters",
    "HostResult",
    "LabError",
    "LabInputError",
    "LabResult",
    "Link",
    "RankResult",
    "available",
    "format_rate",
    "in_lab",
    "lab_bytes",
    "name_rank",
    "name_ranks",
    "own_counters",
    "parse_latency",
    "parse_link",
    "parse_links",
    "parse_rate",
    "print_line",
    "privilege",
    "read_counters",
    "run_lab",
]
