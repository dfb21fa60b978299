"""Topologies: which ranks are neighbours (floor 2). Each file has one topology, imported here by one line."""

from gossamer.topologies.bipartite import Bipartite
from gossamer.topologies.complete import Complete
from gossamer.topologies.exponential import Exponential
from gossamer.topologies.graph import Graph
from gossamer.topologies.ring import Ring
from gossamer.topologies.switch import Switch
from gossamer.topologies.two_way import TwoWay

__all__ = ["Bipartite", "Complete", "Exponential", "Graph", "Ring", "Switch", "TwoWay"]
