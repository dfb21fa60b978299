"""Layer 3: exchanges, which average a bucket over the ranks. One exchange per file, one import line here."""

from gossamer.exchanges.allreduce import AllReduced
from gossamer.exchanges.fetch_sgd import FetchSGD
from gossamer.exchanges.gather import Gather
from gossamer.exchanges.gtopk import GTopK
from gossamer.exchanges.nodes import Nodes
from gossamer.exchanges.robust import Clipped, Median, RobustMean, Trimmed
from gossamer.exchanges.scatter import Scatter

__all__ = [
    "AllReduced",
    "Clipped",
    "FetchSGD",
    "GTopK",
    "Gather",
    "Median",
    "Nodes",
    "RobustMean",
    "Scatter",
    "Trimmed",
]
