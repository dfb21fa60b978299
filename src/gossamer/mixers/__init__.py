"""Mixers: how a rank averages its model with its neighbours (floor 3). Each file has one mixer, imported here by one line."""

from gossamer.mixers.choco import Choco
from gossamer.mixers.push_sum import PushSum
from gossamer.mixers.symmetric import Symmetric

__all__ = ["Choco", "PushSum", "Symmetric"]
