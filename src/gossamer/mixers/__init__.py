"""Floor 3: who pulls whose model. One mixer per file, one import line here."""

from gossamer.mixers.choco import Choco
from gossamer.mixers.push_sum import PushSum
from gossamer.mixers.symmetric import Symmetric

__all__ = ["Choco", "PushSum", "Symmetric"]
