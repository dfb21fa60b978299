"""A run that torchrun starts again when a rank dies; it goes on from the newest complete checkpoint.

$ export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1   # else started again, ranks read what the last attempt wrote
$ torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/resumable.py runs/7

A signal to one of the ranks, SIGTERM or SIGUSR1, lets all of them save after the same step and end.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gossamer

options = argparse.ArgumentParser()
options.add_argument("folder", type=Path, help="on a disk that all ranks see")
options.add_argument("--recipe", default="topk")
options.add_argument("--steps", type=int, default=60)
options.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
asked = options.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)  # the same samples, and the same model, on all ranks
x = torch.randn(500, 32)
samples = TensorDataset(x, x.square().mean(1, keepdim=True))
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

with gossamer.attach(model, optimizer, asked.recipe) as comm, comm.leaving_at(seconds=120):
    order = gossamer.data.Order(len(samples), seed=0, samples=32, comm=comm)
    loader = DataLoader(samples, batch_sampler=order)
    resumed = gossamer.checkpoint.resume(comm, asked.folder, order=order)
    if comm.rank == 0:
        print(resumed, flush=True)
    while comm.step < asked.steps and not comm.stopping:
        for x, y in order.over(loader):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            if comm.stopping or comm.step % asked.every == 0:
                gossamer.checkpoint.save(comm, asked.folder / f"step{comm.step}", order=order)
            if comm.stopping or comm.step == asked.steps:
                break
    if ended := comm.step == asked.steps:
        comm.finish()
    if comm.rank == 0:
        print(f"trained to step {comm.step} in epoch {order.epoch}", flush=True)

if ended and dist.get_rank() == 0:
    asked.folder.mkdir(parents=True, exist_ok=True)  # a run of few steps has saved nothing
    torch.save(model.state_dict(), part := asked.folder / "model.part")
    part.replace(asked.folder / "model.pt")  # whole from the first: launchers take it for the end of the run
dist.destroy_process_group()
