"""What benchmarks that need ranks on this machine share."""

import os
import subprocess
import sys


def start_ranks(count: int, port: int) -> int:
    """As torchrun does, on this machine: this very command on every rank, with `--rank`; the largest exit code."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(count)}
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv, "--rank"], env=os.environ | place | {"RANK": str(rank)})
        for rank in range(count)
    ]
    try:
        codes = [rank.wait() for rank in ranks]
    finally:
        for rank in ranks:  # after ctrl-C none is left
            rank.kill()
    return max(code if code >= 0 else 128 - code for code in codes)
