"""A node's rank, which trains as part of a member: `torchrun --nproc-per-node 2 node_member.py STORE FOLDER RECIPE`."""

import json
import os
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import nn

import gossamer
from gossamer.core.errors import GossamerError

AT, FOLDER, RECIPE = sys.argv[1], Path(sys.argv[2]), sys.argv[3]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())
    group = gossamer.members(5.0, least=2, most=3, store=AT)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    comm = gossamer.attach(model, optimizer, RECIPE, group, nodes="members", deadline=40.0)
    began, seen = comm.step, list[tuple[int, ...]]()
    (FOLDER / f"pid{comm.rank}").write_text(f"{os.getpid()} {comm.step}")
    while comm.step < 30 or not group.store.flag_is_up("enough"):
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        if not seen or seen[-1] != comm.present:
            seen.append(comm.present)
            (FOLDER / f"sees{comm.rank}").write_text(json.dumps(comm.present))
        time.sleep(0.005)
    comm.finish()
    flat = torch.cat([p.detach().view(-1) for p in model.parameters()]).tolist()
    told = {"began": began, "seen": seen, "flat": flat, "recipe": repr(comm.recipe), "inside": comm.ledger.per_node}
    (FOLDER / f"end{comm.rank}").write_text(json.dumps(told))


if __name__ == "__main__":
    warnings.simplefilter("ignore", RuntimeWarning)
    try:
        main()
    except GossamerError as error:
        (FOLDER / f"error{os.environ['LOCAL_RANK']}of{os.getppid()}").write_text(str(error))
        raise
