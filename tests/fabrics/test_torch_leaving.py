"""A process with a fabric ends cleanly, however it leaves."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.gang import free_port

pytestmark = pytest.mark.gang

LEAVING = """
import gc, os, sys, warnings
warnings.simplefilter("error")
import torch, torch.distributed as dist
from gossamer.core.verbs import all_reduce, take_ticket, wait_quorum
from gossamer.fabrics.torch.fabric import TorchFabric

folder, *plans = sys.argv[1:]
torch.set_num_threads(1)
gc.freeze()  # what all begin with is not looked through by each as it ends, which takes a second
warnings.filterwarnings("ignore", ".*fork")
born = {}
for plan in plans:  # what takes seconds to load is loaded once, for all ranks of all plans
    port, *how = plan.split()
    for rank in range(2):
        name = f"{folder}/{' '.join(how)}-{rank}"
        if not (child := os.fork()):
            break  # a rank like any other: it comes to its end as an interpreter does
        born[child] = name
    else:
        continue
    break
else:
    for child, name in born.items():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        open(name, "a").write(f"ended with {code}")
    sys.exit()
os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), 2)

dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
fabric = TorchFabric(deadline=30, check=1)
assert fabric.run(all_reduce(torch.ones(1))).item() == 2
if "stuck" in how and rank == 0:
    fabric.start(all_reduce(torch.ones(1)))
if "polling" in how:
    fabric.start(wait_quorum("never", 3))
if "early" in how:
    fabric.close()
if "destroy" in how:
    dist.destroy_process_group()
if "late" in how:
    fabric.close()
"""

WAYS = ["", "destroy", "early destroy", "destroy late", "polling", "polling destroy", "stuck", "stuck destroy"]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ranks have said that left in each way, and how they ended."""
    folder = tmp_path_factory.mktemp("left")
    plans = [f"{free_port()} {how}" for how in WAYS]
    subprocess.run([sys.executable, "-c", LEAVING, str(folder), *plans], timeout=300, check=True)
    return folder


@pytest.mark.parametrize("how", WAYS)
def test_the_interpreter_ends_cleanly(left: Path, how: str) -> None:
    for rank in range(2):
        said = (left / f"{how}-{rank}").read_text().splitlines()
        assert [line for line in said if "hostname" not in line] == ["ended with 0"]
