"""Layer 3: memories, which keep what compression leaves out. One memory per file, one import line here."""

from gossamer.memories.diana import DIANA
from gossamer.memories.ef21 import EF21
from gossamer.memories.error_feedback import ErrorFeedback
from gossamer.memories.momentum_correction import MomentumCorrection
from gossamer.memories.none import NoMemory
from gossamer.memories.own_gradient import OwnGradient

__all__ = ["DIANA", "EF21", "ErrorFeedback", "MomentumCorrection", "NoMemory", "OwnGradient"]
