"""Floor 3: who pulls whose model. One mixer per file, one import line here."""

from gossamer.mixers.push_sum import PushSum

__all__ = ["PushSum"]
