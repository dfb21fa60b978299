"""Holds the store in which the members of a run find one another; it needs no GPU, and must outlive them all.

$ python examples/launch/store.py 29500        # on the machine that MASTER_ADDR names; one for each run

A scheduler that ends a job ends all that the job has started. So a store that the member of rank 0 starts would end with
that member: start it apart, where nothing is taken away. SIGTERM ends it.
"""

import signal
import sys
from datetime import timedelta

from torch.distributed import TCPStore

port = int(sys.argv[1])
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
store = TCPStore("0.0.0.0", port, None, True, timedelta(seconds=300), wait_for_workers=False)
print(f"the store listens on port {store.port}", flush=True)
while True:
    signal.pause()
