"""Ray Train with as many workers as find room, from two to four; after a failure there may be fewer or more.

$ python examples/launch/ray/train.py runs/ray

After a failure Ray starts all workers anew, and they load what those before them saved. With as many workers as before they
go on as if nothing had happened; with another number, from the public model.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import Tensor, nn

import gossamer
from gossamer.trainers import sidecars

SAMPLES, BATCH = 480, 8


def batches(rank: int, size: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A rank's share of an epoch: all ranks together see each sample once, however many they are."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
    for mine in order.view(-1, size, BATCH)[:, rank]:
        x = torch.stack([torch.randn(16, generator=torch.Generator().manual_seed(int(i))) for i in mine])
        yield x, x.roll(1, 1).sin()


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)).to(ray.train.torch.get_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    comm = gossamer.attach(model, optimizer, config["recipe"])
    epoch, last = 0, ray.train.get_checkpoint()
    if last is not None:
        with last.as_directory() as folder:
            saved = torch.load(Path(folder, "public.pt"))
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            sidecars.load(comm, folder)
            epoch = saved["epoch"]
    while epoch < config["epochs"]:
        loss = None
        for x, y in batches(comm.rank, comm.size, epoch):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        epoch += 1
        with tempfile.TemporaryDirectory() as folder:
            sidecars.write(comm, folder)
            with comm.consensus():
                public = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                if comm.rank == 0:
                    torch.save({**public, "epoch": epoch}, Path(folder, "public.pt"))
            metrics = {"epoch": epoch, "loss": loss.item(), "workers": comm.size}
            if comm.rank == 0:
                print(metrics, flush=True)
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))
    comm.finish()


def fit(folder: str, epochs: int) -> Result:
    trainer = TorchTrainer(
        train,
        train_loop_config={"recipe": "topk", "epochs": epochs},
        scaling_config=ScalingConfig(num_workers=(2, 4)),
        run_config=RunConfig(
            storage_path=os.path.abspath(folder), name="elastic", failure_config=FailureConfig(max_failures=3)
        ),
    )
    return trainer.fit()


if __name__ == "__main__":
    ray.init(num_cpus=4)
    print(fit(sys.argv[1], epochs=6).metrics)
