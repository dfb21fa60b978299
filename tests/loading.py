"""Imported before all that takes long to load: meanwhile garbage is not looked for, which takes a quarter of that time.

Processes that are forked from this one look for it again.
"""

import gc
import os

gc.disable()
os.register_at_fork(after_in_child=gc.enable)
