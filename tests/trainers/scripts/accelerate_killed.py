"""Runs that are killed right after a save, and runs that load it: FOLDER unbroken|killed|resumed STEP RECIPE..."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate_model import Loop, save

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, how, saved, *recipes = sys.argv[1:]
    for recipe in recipes:
        loop, place = Loop(recipe), str(Path(folder) / f"state {recipe}")

        def at(step: int) -> None:
            if step == int(saved):
                loop.accelerator.save_state(place)  # noqa: B023
                os.kill(os.getpid(), signal.SIGKILL)

        if how == "killed":
            loop.train(each=at)
        elif how == "resumed":
            loop.accelerator.load_state(place)
        begin = int(saved) if how == "resumed" else 0
        save(Path(folder), f"{how} {recipe}", loop.rank, {"weights": loop.train(begin=begin)})
        loop.close()
    dist.destroy_process_group()
