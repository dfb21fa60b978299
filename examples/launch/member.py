"""One member of a run that goes on when others die; whatever starts it starts it again until it ends well.

$ python examples/launch/store.py 29500 &      # on a machine that stays
$ export MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 WORLD_SIZE=3 RANK=0       # RANK: another one for each member
$ until python examples/launch/member.py runs/7; do sleep 5; done

Each member saves its model and its optimizer now and then. Who comes back while others train gets the model of the others,
and only its own optimizer from its file. Who comes when nobody trains, since all were lost, begins with the newest file.

SIGTERM or SIGUSR1 lets it have its last steps merged, leave the others, save, and end with exit code 75: "start me again
elsewhere, or later".
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import gossamer

options = argparse.ArgumentParser()
options.add_argument("folder", type=Path, help="best on a disk that all members see")
options.add_argument("--steps", type=int, default=2000)
options.add_argument("--every", type=int, default=50, help="steps between two saves")
options.add_argument("--pause", type=float, default=0.0, help="seconds to wait in each step, as a larger model would")
asked = options.parse_args()

rank = int(os.environ["RANK"])
torch.set_num_threads(1)
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
model.register_buffer("earlier", torch.zeros((), dtype=torch.int64))  # steps before all members were lost at once
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

asked.folder.mkdir(parents=True, exist_ok=True)
own = asked.folder / f"member{rank}.pt"
if files := sorted(asked.folder.glob("member*.pt"), key=lambda file: file.stat().st_mtime):
    newest = torch.load(files[-1], weights_only=True)
    if newest["steps"] >= asked.steps:
        print(f"rank {rank}: the run has ended at step {newest['steps']}", flush=True)
        sys.exit()
    model.load_state_dict(newest["model"])
    model.earlier.fill_(newest["steps"])  # who joins others gets theirs instead, as all buffers
if own.exists():
    optimizer.load_state_dict(torch.load(own, weights_only=True)["optimizer"])

group = gossamer.members()
comm = gossamer.attach(model, optimizer, "decoupled_diloco(8)", group)
print(f"rank {rank} trains from step {comm.step + int(model.earlier)}, with ranks {comm.present}", flush=True)


def save() -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": comm.step + int(model.earlier)}
    torch.save(state, part := own.with_suffix(".part"))
    os.replace(part, own)  # whoever reads finds a whole file, also when this process is killed


with comm.leaving_at(seconds=120):
    while comm.step + int(model.earlier) < asked.steps and not comm.stopping:
        x = torch.randn(16, 32)
        optimizer.zero_grad()
        (model(x) - x.square().mean(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        time.sleep(asked.pause)
        if comm.step % asked.every == 0:
            save()
if comm.stopping:
    save()
    comm.detach()  # waits for nobody
    print(f"rank {rank} was told to stop, and left at step {comm.step}", flush=True)
    sys.exit(os.EX_TEMPFAIL)
comm.finish()
save()
print(f"rank {rank} ended at step {comm.step + int(model.earlier)} with ranks {comm.present}", flush=True)
