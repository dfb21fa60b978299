"""The same with DistributedDataParallel; the loss goes by way of on_metrics."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gossamer

if not dist.is_initialized():
    dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
hook = gossamer.ddp.register(model, on_metrics=lambda step, metrics: {"loss": loss.item()}, metrics_every=2)
for _ in range(8):
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    loss = (model(x) - x[:, :1]).square().mean()
    loss.backward()
    optimizer.step()
hook.close()
