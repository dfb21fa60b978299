"""A process with a fabric ends cleanly, however it leaves."""

import subprocess
import sys

import pytest
from tests.gang import free_port

pytestmark = pytest.mark.gang

LEAVING = """
import os, sys, warnings
warnings.simplefilter("error")
import torch, torch.distributed as dist
from gossamer.core.verbs import all_reduce, claim, closed
from gossamer.fabrics.torch import TorchFabric

rank, (port, *how) = int(sys.argv[1]), sys.argv[2:]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
fabric = TorchFabric(deadline=30, check=1)
assert fabric.run(all_reduce(torch.ones(1))).item() == 2
if "stuck" in how and rank == 0:
    fabric.start(all_reduce(torch.ones(1)))
if "polling" in how:
    fabric.start(closed("never", 3))
if "early" in how:
    fabric.close()
if "destroy" in how:
    dist.destroy_process_group()
if "late" in how:
    fabric.close()
"""


@pytest.mark.parametrize(
    "how", ["", "destroy", "early destroy", "destroy late", "polling", "polling destroy", "stuck", "stuck destroy"]
)
def test_the_interpreter_ends_cleanly(how: str) -> None:
    port = free_port()
    command = [sys.executable, "-c", LEAVING]
    both = [
        subprocess.Popen([*command, str(r), str(port), *how.split()], stderr=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    for process in both:
        _, errors = process.communicate(timeout=60)
        complaints = [line for line in errors.splitlines() if "hostname" not in line]
        assert (process.returncode, complaints) == (0, [])
