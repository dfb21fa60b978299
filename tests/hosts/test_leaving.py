"""Ranks end when they are done, each in its own time; none fails because another one was done before it."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.gang import free_port

pytestmark = pytest.mark.gang

TRAINING = """
import multiprocessing, os, sys, time, warnings
warnings.simplefilter("error")
import torch, torch.distributed as dist
import gossamer
gossamer.attach, torch.optim.SGD([torch.zeros(1)])  # what takes seconds to load is loaded once, for all ranks

folder, port, recipe, steps, *how = sys.argv[1:]
torch.set_num_threads(1)
warnings.filterwarnings("ignore", ".*fork")
born = []
for rank in range(4):
    if not (child := os.fork()):
        break  # a rank like any other: it comes to its end as an interpreter does
    born.append(child)
else:
    sys.exit(max(os.waitpid(child, 0)[1] for child in born) != 0)
os.dup2(os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT), 1)
os.dup2(1, 2)

def train():
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    comm = gossamer.attach(model, optimizer, recipe, deadline=30)
    while comm.step < int(steps):
        x = torch.randn(8, 4)
        optimizer.zero_grad()
        loss = (model(x) - x[:, :1]).square().mean()
        if rank == 3 and comm.step in (0, int(steps) - 2):
            time.sleep(2.5)  # by then the others would have ended
        loss.backward()
        optimizer.step()
    if "detach" in how:
        comm.detach()
    if "destroy" in how:
        dist.destroy_process_group()
    print(comm.step, flush=True)

if "child" in how:
    child = multiprocessing.get_context("fork").Process(target=train)
    child.start()
    child.join()
    sys.exit(child.exitcode)
train()
"""


def ended(folder: Path, recipe: str, steps: int, how: str) -> tuple[int, list[str]]:
    """The exit code, not 0 if that of any rank is not, and what each rank said."""
    command = [sys.executable, "-c", TRAINING, str(folder), str(free_port()), recipe, str(steps), *how.split()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        code = process.wait(timeout=60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return code, [(folder / str(rank)).read_text() for rank in range(4)]


@pytest.mark.parametrize(
    ("recipe", "steps", "how"),
    [
        ("backup", 20, ""),  # the others are through before the last rank has drawn its first ticket
        ("backup", 20, "detach destroy"),
        ("backup", 20, "child"),  # such a process ends without what is registered with atexit
        ("osgp", 5, ""),  # letters that the last rank has not read yet
        ("osgp", 5, "detach destroy"),
    ],
)
def test_a_straggler_ends_as_well_as_those_who_left_before_it(
    tmp_path: Path, recipe: str, steps: int, how: str
) -> None:
    code, said = ended(tmp_path, recipe, steps, how)
    lines = [[line for line in text.splitlines() if "hostname" not in line] for text in said]
    assert (code, lines) == (0, [[str(steps)]] * 4)
