"""Runs a script; in its first attempts rank 1 is killed after so many optimizer steps, as torchrun counts attempts.

torchrun --max-restarts 3 dies.py 15,23,7 SCRIPT ARGUMENT...

With a number below zero it is told to stop after so many steps, by SIGUSR1.
"""

import os
import runpy
import signal
import sys
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
last = [*map(int, sys.argv[1].split(","))]
steps = 0


def die(*_: Any) -> None:
    global steps
    steps += 1
    if steps == abs(last[attempt]):
        os.kill(os.getpid(), signal.SIGKILL if last[attempt] > 0 else signal.SIGUSR1)


if os.environ["RANK"] == "1" and attempt < len(last):
    register_optimizer_step_post_hook(die)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
