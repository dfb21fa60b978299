"""MuLoCo: Muon inside the rounds of DiLoCo, and differences of models in two bits with error feedback between them.

$ torchrun --nproc-per-node 2 examples/muloco.py
$ torchrun --nproc-per-node 2 examples/muloco.py --recipe "allreduce(fp32())"      # Muon on the mean gradient, at every step

Muon is for the matrices of hidden layers. Vectors, embeddings and the output layer have AdamW. Both keep their momenta on
their rank, and nothing of them travels. PyTorch has Muon from 2.9 on.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import gossamer

options = argparse.ArgumentParser()
options.add_argument("--recipe", default="diloco(10) + scatter(eden(2)) + error_feedback()")
options.add_argument("--steps", type=int, default=60)
options.add_argument("--muon-rate", type=float, default=0.02)
options.add_argument("--rate", type=float, default=2e-3)
asked = options.parse_args()

WORDS, LENGTH, WIDTH = 64, 8, 64


class Reader(nn.Module):
    """Says which word follows eight others."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Sequential(nn.Linear(LENGTH * WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.words(text).flatten(1)))


def batch(step: int, rank: int, size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Words of which the next one repeats the first."""
    text = torch.randint(WORDS, (size, LENGTH), generator=torch.Generator().manual_seed(1000 * step + rank))
    return text, text[:, 0]


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = Reader()
matrices = [p for p in model.hidden.parameters() if p.dim() == 2]
others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
muon = torch.optim.Muon(matrices, lr=asked.muon_rate)
adamw = torch.optim.AdamW(others, lr=asked.rate)

with gossamer.attach(model, [muon, adamw], asked.recipe) as comm:  # a step is over when both have stepped
    for step in range(asked.steps):
        text, following = batch(step, rank)
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(text), following)
        loss.backward()
        muon.step()
        adamw.step()
    with comm.consensus(), torch.no_grad():
        text, following = batch(0, 10_000, 1024)
        judged = float(nn.functional.cross_entropy(model(text), following))
    metrics = comm.metrics()

if rank == 0:
    print(f"{asked.recipe}: loss {judged:.3f} after {asked.steps} steps")
    print(f"a rank sent {metrics['sent_bytes'] / asked.steps:.0f} bytes a step, ", end="")
    print(f"{metrics['ratio_to_dense']:.0f} times fewer than dense")
dist.destroy_process_group()
