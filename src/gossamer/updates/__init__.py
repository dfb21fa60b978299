"""Layer 4: updates, which turn the averaged gradient into a step. One update per file, one import line here."""

from gossamer.updates.dion_update import DionUpdate
from gossamer.updates.lion import Lion
from gossamer.updates.onebit_adam_update import OneBitAdamUpdate
from gossamer.updates.onebit_lamb_update import OneBitLambUpdate
from gossamer.updates.signs import Signs
from gossamer.updates.zero_one_adam_update import ZeroOneAdamUpdate

__all__ = ["DionUpdate", "Lion", "OneBitAdamUpdate", "OneBitLambUpdate", "Signs", "ZeroOneAdamUpdate"]
