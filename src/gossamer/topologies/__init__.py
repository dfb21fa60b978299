"""Floor 2: who is whose neighbour. One topology per file, one import line here."""

from gossamer.topologies.complete import Complete
from gossamer.topologies.exponential import Exponential
from gossamer.topologies.ring import Ring

__all__ = ["Complete", "Exponential", "Ring"]
