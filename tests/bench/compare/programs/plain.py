"""A script such as torchrun starts, with a plain model; its argument says what is wrong with it."""

import contextlib
import itertools
import os
import sys

import torch
import torch.distributed as dist

import gossamer

wrong = sys.argv[1] if len(sys.argv) > 1 else ""
if not dist.is_initialized():
    dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
if wrong != "never attaches":
    comm = gossamer.attach(model, optimizer, "qsgd(bits=2)" if wrong == "ignores" else None)
if wrong == "attaches twice":
    again = torch.nn.Linear(2, 1)
    gossamer.attach(again, torch.optim.SGD(again.parameters(), lr=0.1))

with contextlib.ExitStack() as stack:
    stack.callback(lambda: comm.detach() if "comm" in globals() else None)
    if wrong == "resumes" and os.path.exists("snapshot.pt"):
        model.load_state_dict(torch.load("snapshot.pt"))
    for step in itertools.count(1) if wrong == "never stops" else range(1, 9):
        x = torch.randn(16, 8)
        optimizer.zero_grad()
        losses = (model(x) - x[:, :1]).square().squeeze(1)
        loss = losses.mean()
        losses.backward(torch.full_like(losses, 1 / 16)) if wrong == "never tells" else loss.backward()
        optimizer.step()
        if wrong not in ("never tells", "tells nothing", "judges") and (rank == 0 or wrong == ""):
            comm.log(loss=loss)
        if wrong == "resumes" and rank == 0 and step == 8:
            torch.save(model.state_dict(), "snapshot.pt")
        if wrong == "judges" and step % 4 == 0:
            comm.log(held_out=1.0 / step + rank)
        if wrong == "fails" and rank == 1 and step == 3:
            print("rank 1 was here", file=sys.stderr)
            raise ZeroDivisionError("no more data")
