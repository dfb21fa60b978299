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
import gc, multiprocessing, os, sys, time, warnings
warnings.simplefilter("error")
import torch, torch.distributed as dist
import gossamer
from gossamer import kernels, recipes
gossamer.attach, torch.optim.SGD([torch.zeros(1)]).zero_grad()  # what takes seconds to load is loaded once, for all ranks
kernels.warmup()
gc.freeze()  # what all begin with is not looked through by each as it ends, which takes a second

folder, *plans = sys.argv[1:]
torch.set_num_threads(1)
warnings.filterwarnings("ignore", ".*fork")
born = {}
for plan in plans:  # all at once: they wait more than they compute
    port, recipe, steps, *how = plan.split()
    for rank in range(4):
        name = f"{folder}/{' '.join([recipe, *how])}-{rank}"
        if not (child := os.fork()):
            break  # a rank like any other: it comes to its end as an interpreter does
        born[child] = name
    else:
        continue
    break
else:
    for child, name in born.items():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        open(name, "a").write(f"\\nended with {code}")
    sys.exit()
os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), 1)
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

PLANS = [
    ("backup", 20, ""),  # the others are through before the last rank has drawn its first handle
    ("backup", 20, "detach destroy"),
    ("backup", 20, "child"),  # such a process ends without what is registered with atexit
    ("osgp", 5, ""),  # letters that the last rank has not read yet
    ("osgp", 5, "detach destroy"),
    ("ad_psgd", 5, ""),  # the last rank answers the first, or asks them
]

# Of gloo; and of triton's bindings, to which what is frozen looks as if it had leaked.
NOT_OURS = ("hostname", "nanobind", " - leaked ", " - ... skipped", "refleaks")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each rank said, and how it ended."""
    folder = tmp_path_factory.mktemp("ended")
    plans = [f"{free_port()} {recipe} {steps} {how}" for recipe, steps, how in PLANS]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(folder), *plans], env=environment, start_new_session=True
    )
    try:
        process.wait(timeout=300)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return folder


@pytest.mark.parametrize(("recipe", "steps", "how"), PLANS)
def test_a_straggler_ends_as_well_as_those_who_left_before_it(ended: Path, recipe: str, steps: int, how: str) -> None:
    for rank in range(4):
        said = (ended / f"{' '.join([recipe, *how.split()])}-{rank}").read_text().splitlines()
        assert [line for line in said if line and not any(word in line for word in NOT_OURS)] == [
            str(steps),
            "ended with 0",
        ]
