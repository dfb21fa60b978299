"""A loop of Accelerate as its users write it: accumulation, clipping, AdamW. With a recipe it has one line more."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gossamer.integrations import Communicator
from gossamer.trainers.accelerate import attach

MICRO, BATCH, STEPS = 2, 2, 9


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))


def rows() -> TensorDataset:
    x = torch.randn(2 * MICRO * BATCH * STEPS, 7, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].sin())


def fresh(**options: Any) -> Accelerator:
    """An accelerator; what Accelerate keeps for the whole process is forgotten."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, gradient_accumulation_steps=MICRO, **options)


class Loop:
    """One training; `recipe=""` is the stock loop."""

    def __init__(self, recipe: str, whole: bool = False, public_only: bool = False, **options: Any) -> None:
        self.accelerator = accelerator = fresh(**options)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        loader = DataLoader(rows(), batch_size=BATCH)
        if whole:  # without Accelerate's DDP
            self.model = accelerator.prepare_model(model, evaluation_mode=True)
            self.optimizer, self.loader = accelerator.prepare(optimizer, loader)
        else:
            self.model, self.optimizer, self.loader = accelerator.prepare(model, optimizer, loader)
        self.comm: Communicator | None = None
        if recipe:
            self.comm = attach(accelerator, self.model, self.optimizer, recipe, seed=3, public_only=public_only)
        self.rank = accelerator.process_index

    def train(self, begin: int = 0, end: int = STEPS, each: Callable[[int], None] = lambda step: None) -> list[Tensor]:
        """The parameters after each step."""
        accelerator, seen = self.accelerator, list[Tensor]()
        loader = accelerator.skip_first_batches(self.loader, begin * MICRO) if begin else self.loader
        for x, y in loader:
            with accelerator.accumulate(self.model):
                accelerator.backward(nn.functional.mse_loss(self.model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.model.parameters(), 0.05)
                self.optimizer.step()
                self.optimizer.zero_grad()
            if accelerator.sync_gradients:
                seen.append(flat(self.model))
                each(begin + len(seen))
                if begin + len(seen) == end:
                    break
        return seen

    def close(self) -> None:
        if self.comm is not None:
            self.comm.detach()


def plain(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}


def save(folder: Path, case: str, rank: int, told: dict[str, Any]) -> None:
    torch.save(told, folder / f"{case}-rank{rank}.pt")
