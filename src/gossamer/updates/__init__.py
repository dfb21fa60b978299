"""Floor 4: what is made of an agreed gradient. One update per file, one import line here."""

from gossamer.updates.adam_after import AdamAfter
from gossamer.updates.adam_frozen import AdamFrozen
from gossamer.updates.lamb_after import LambAfter
from gossamer.updates.signs import Signs

__all__ = ["AdamAfter", "AdamFrozen", "LambAfter", "Signs"]
