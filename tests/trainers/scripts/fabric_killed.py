"""A loop of Fabric that is killed in the middle of a round, and others that resume it or run unbroken.

torchrun --nproc-per-node 2 fabric_killed.py FOLDER killed|resumed RECIPE...
"""

import os
import sys
from pathlib import Path

import torch
from fabric_cases import Loop, flat

from gossamer.trainers.fabric import Strategy

RANK = os.environ["RANK"]


def ended(loop: Loop, steps: int) -> torch.Tensor:
    loop.train(steps)
    loop.fabric.strategy.comm.finish()
    return flat(loop.plain)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, mode, recipes = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if mode == "killed":
        loop = Loop(Strategy(recipes[0]))
        loop.train(6)
        loop.fabric.save(folder / f"{recipes[0]}.ckpt", loop.state)
        loop.train(1)
        os.kill(os.getpid(), 9)
    out = {}
    for recipe in recipes:
        unbroken = ended(Loop(Strategy(recipe)), 10)
        loop = Loop(Strategy(recipe))
        loop.fabric.load(folder / f"{recipe}.ckpt", loop.state)
        begun = loop.state["step"]
        out[recipe] = unbroken, ended(loop, 10 - begun), begun
    torch.save(out, folder / f"resumed-rank{RANK}.pt")
