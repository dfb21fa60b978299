"""A Trainer that is killed in the middle of a round, and another that resumes it; one more runs unbroken.

torchrun --nproc-per-node 2 hf_killed.py FOLDER killed|resumed RECIPE
"""

import os
import sys
from pathlib import Path

import torch
from hf_model import Kill, flat, trainer_of
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

from gossamer.trainers import hf


def trainer(folder: Path, recipe: str, *callbacks: Kill) -> Trainer:
    made = trainer_of(folder, *callbacks, save_strategy="steps", save_steps=3, max_steps=11)
    hf.use(made, recipe)
    return made


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, mode, recipe = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    if mode == "killed":
        trainer(folder / "run", recipe, Kill(7)).train()
    else:
        last = get_last_checkpoint(folder / "run")
        second = trainer(folder / "run", recipe)
        second.train(resume_from_checkpoint=True)
        whole = trainer(folder / "whole", recipe)
        whole.train()
        out = {
            "from": int(str(last).rpartition("-")[2]),
            "resumed": flat(second.model),
            "unbroken": flat(whole.model),
        }
        torch.save(out, folder / f"resumed-rank{os.environ['RANK']}.pt")
