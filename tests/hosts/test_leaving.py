"""Ranks end when they are done, each in its own time; none fails because another one was done before it."""

import os
import subprocess
import sys

import pytest
from tests.gang import free_port

pytestmark = pytest.mark.gang

TRAINING = """
import multiprocessing, sys, time, warnings
warnings.simplefilter("error")
import torch, torch.distributed as dist
import gossamer

rank, (port, recipe, steps, *how) = int(sys.argv[1]), sys.argv[2:]
torch.set_num_threads(1)

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
    warnings.filterwarnings("ignore", ".*fork")
    child = multiprocessing.get_context("fork").Process(target=train)
    child.start()
    child.join()
    sys.exit(child.exitcode)
train()
"""


def ended(recipe: str, steps: int, how: str) -> list[tuple[int, str, str]]:
    port = free_port()
    command = [sys.executable, "-c", TRAINING]
    ranks = [
        subprocess.Popen(
            [*command, str(r), str(port), recipe, str(steps), *how.split()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for r in range(4)
    ]
    try:
        said = [process.communicate(timeout=60) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    return [(p.returncode, out.strip(), err) for p, (out, err) in zip(ranks, said, strict=True)]


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
def test_a_straggler_ends_as_well_as_those_who_left_before_it(recipe: str, steps: int, how: str) -> None:
    for code, out, err in ended(recipe, steps, how):
        complaints = [line for line in err.splitlines() if "hostname" not in line]
        assert (code, out, complaints) == (0, str(steps), [])
