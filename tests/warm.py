"""Loads all compiled kernels: imported where processes are forked from, it saves each of them a second of its processor.

What is loaded by then stays: the ranks need not look through it, when they collect what nobody holds any more or look for a
wrapper round their model.
"""

import atexit
import gc

from gossamer import kernels

kernels.warmup()
gc.freeze()
atexit.register(gc.unfreeze)  # some libraries count what is left of them in the end
