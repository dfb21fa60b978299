"""A small model of Lightning, with rows that follow from the rank and the number of the batch."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from torch import Tensor, nn

BATCHES = 12  # micro-batches of an epoch


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def rows(batch: int, rank: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1000 * rank + batch)
    return torch.randn(4, 6, generator=rng), torch.randn(4, 2, generator=rng)


class Regressor(pl.LightningModule):
    """Takes its rows by the number of the batch, so that a resumed run goes on where it was."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 2)

    def loss(self, batch: int) -> Tensor:
        x, y = rows(batch, self.global_rank)
        return (self.outer(torch.tanh(self.inner(x))) - y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.trainer.fit_loop.epoch_loop.total_batch_idx)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("held_out", self.loss(10_000), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("tested", self.loss(10_000), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.outer(torch.tanh(self.inner(rows(20_000, 0)[0])))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.arange(BATCHES * self.trainer.world_size))

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.arange(2 * self.trainer.world_size))

    test_dataloader = predict_dataloader = val_dataloader


class ManualRegressor(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(self.trainer.fit_loop.epoch_loop.total_batch_idx))
        optimizer.step()


class Kill(Callback):
    """Ends all ranks with SIGKILL after a step, as a machine does that is taken away."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
        if trainer.global_step >= self.step:
            os.kill(os.getpid(), 9)


def trainer_of(strategy: Any, folder: Path, *callbacks: Callback, **options: Any) -> pl.Trainer:
    """A trainer of 10 steps of 2 micro-batches, with clipping."""
    given = {
        "max_steps": 10, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "log_every_n_steps": 2, "logger": False,
        "num_sanity_val_steps": 1, "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(each, Checkpoint) for each in callbacks),
    }  # fmt: skip
    return pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        default_root_dir=folder,
        callbacks=[*callbacks],
        **given | options,
    )
