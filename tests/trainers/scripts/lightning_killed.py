"""A trainer that is killed in the middle of a round, and others that resume it or run unbroken.

torchrun --nproc-per-node 2 lightning_killed.py FOLDER killed|resumed RECIPE...
"""

import os
import sys
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning_model import Kill, Regressor, flat, trainer_of

from gossamer.trainers.lightning import Strategy

RANK = os.environ["RANK"]


def fit(recipe: str, folder: Path, *callbacks: Callback, path: Path | None = None) -> tuple[torch.Tensor, int]:
    model = Regressor()
    trainer = trainer_of(Strategy(recipe), folder, *callbacks)
    trainer.fit(model, ckpt_path=path)
    return flat(model), trainer.global_step


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, mode, recipes = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if mode == "killed":
        (recipe,) = recipes
        saves = ModelCheckpoint(folder / recipe, "{step}", every_n_train_steps=3, save_top_k=-1)
        fit(recipe, folder, saves, Kill(7))
    else:
        out = {}
        for recipe in recipes:
            unbroken, _ = fit(recipe, folder)
            out[recipe] = unbroken, *fit(recipe, folder, path=folder / recipe / "step=6.ckpt")
        torch.save(out, folder / f"resumed-rank{RANK}.pt")
