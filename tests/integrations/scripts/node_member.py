"""A node's rank, which trains as part of a member: `torchrun --nproc-per-node 2 node_member.py STORE FOLDER RECIPE`.

With a fourth word, `shards`, FSDP2 cuts the model over the ranks of the node.
"""

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gossamer
from gossamer.core.errors import GossamerError

AT, FOLDER, RECIPE = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
SHARDS = sys.argv[4:] == ["shards"]


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if SHARDS else tensor).detach()


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    if SHARDS:
        dist.init_process_group("gloo")  # the ranks of this node
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    group = gossamer.members(5.0, least=2, most=3, store=AT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    comm = gossamer.attach(model, optimizer, RECIPE, group, nodes=None if SHARDS else "members", deadline=40.0)
    began, seen, until = comm.step, list[tuple[int, ...]](), None
    (FOLDER / f"pid{comm.rank}").write_text(f"{os.getpid()} {comm.step}")
    while until is None or comm.step < until:
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        if not seen or seen[-1] != comm.present:
            seen.append(comm.present)
            (FOLDER / f"sees{comm.rank}").write_text(json.dumps(comm.present))
        if until is None and group.store.flag_is_up("until"):
            until = int(group.store.read(["until"])[0])
        time.sleep(0.005)
    comm.finish()
    flat = torch.cat([whole(p).reshape(-1) for p in model.parameters()]).tolist()
    told = {"began": began, "seen": seen, "flat": flat, "recipe": repr(comm.recipe), "inside": comm.ledger.per_node}
    told["step"] = comm.step
    (FOLDER / f"end{comm.rank}").write_text(json.dumps(told))


if __name__ == "__main__":
    warnings.simplefilter("ignore", RuntimeWarning)
    try:
        main()
    except GossamerError as error:
        (FOLDER / f"error{os.environ['LOCAL_RANK']}of{os.getppid()}").write_text(str(error))
        raise
