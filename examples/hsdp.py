"""A model that FSDP2 shards inside a replica; gossamer averages between replicas, by any recipe.

$ torchrun --nproc-per-node 4 examples/hsdp.py                 # two replicas of two shards
$ torchrun --nproc-per-node 4 examples/hsdp.py --recipe "scatter(qsgd()) + local_sgd(8)"
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gossamer

options = argparse.ArgumentParser()
options.add_argument("--recipe", default="topk")
options.add_argument("--shards", type=int, default=2)
options.add_argument("--steps", type=int, default=30)
asked = options.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size // asked.shards, asked.shards), mesh_dim_names=("replicate", "shard"))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

with gossamer.attach(model, optimizer, asked.recipe) as comm:  # the loop does not change
    for step in range(asked.steps):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
        optimizer.zero_grad()
        loss = (model(x) - x.square().mean(1, keepdim=True)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    comm.check_sync()
    with comm.consensus(), torch.no_grad():
        x = torch.randn(256, 32, generator=torch.Generator().manual_seed(7))
        judged = float((model(x) - x.square().mean(1, keepdim=True)).square().mean())
    metrics = comm.metrics()

if rank == 0:
    print(f"{asked.recipe}: loss {judged:.4f} after {asked.steps} steps")
    print(f"a rank sent {metrics['sent_bytes'] / asked.steps:.0f} bytes a step between replicas, ", end="")
    print(f"{metrics['ratio_to_dense']:.1f} times fewer than dense")
dist.destroy_process_group()
