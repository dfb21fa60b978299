"""Loads all compiled kernels: imported where processes are forked from, it saves each of them a second of its processor.

So it does with the parts of torch that save and shard models, which ranks that do so would load each by itself.

What is loaded by then stays: the ranks need not look through it, when they collect what nobody holds any more or look for a
wrapper round their model.
"""

import atexit
import gc
import importlib

from gossamer import kernels

kernels.warmup()
for name in ("torch.distributed.checkpoint", "torch.distributed.fsdp"):
    importlib.import_module(name)
gc.freeze()
atexit.register(gc.unfreeze)  # some libraries count what is left of them in the end
gc.set_threshold(10_000)  # as in the process of the tests
