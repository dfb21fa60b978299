"""What communication costs: a cluster as a value, and the seconds of a request on it."""

from gossamer.costs.cluster import Cluster, Hosts, from_flags
from gossamer.costs.crossing import Crossing, crossing_of
from gossamer.costs.severity import Bearable, busy, severity

__all__ = ["Bearable", "Cluster", "Crossing", "Hosts", "busy", "crossing_of", "from_flags", "severity"]
