"""A training script as many have one: its own loop, DistributedDataParallel, accumulation, autocast, clipping, checkpoints.

$ GOSSAMER_RECIPE=qsgd torchrun --nproc-per-node 2 examples/own_loop.py
$ gossamer compare --script examples/own_loop.py ddp qsgd topk --hosts 2 --rate 100mbit -- --steps 60
$ GOSSAMER_RECIPE=qsgd torchrun --nproc-per-node 8 examples/own_loop.py --device cuda --half --width 1024 --layers 8 --heads 16

All that gossamer needs of it are the two lines that say so.
"""

import argparse
import json
import math
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gossamer

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=100)
options.add_argument("--accumulate", type=int, default=2)
options.add_argument("--batch", type=int, default=8)
options.add_argument("--context", type=int, default=64)
options.add_argument("--width", type=int, default=128)
options.add_argument("--layers", type=int, default=2)
options.add_argument("--heads", type=int, default=4)
options.add_argument("--rate", type=float, default=2e-3)
options.add_argument("--judge-every", type=int, default=20)
options.add_argument("--device", default="cpu", help="cuda: a GPU for each rank")
options.add_argument("--half", action="store_true", help="autocast to bfloat16")
options.add_argument("--checkpoint", type=Path)
asked = options.parse_args()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.look, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (asked.heads, -1)).transpose(1, 2) for part in self.look(self.before(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.think(self.between(x))


class Reader(nn.Module):
    """Says which byte comes next."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(asked.layers)), nn.LayerNorm(width))
        self.next = nn.Linear(width, 256, bias=False)

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        x = self.bytes(text) + self.places(torch.arange(text.shape[1], device=text.device))
        return F.cross_entropy(self.next(self.blocks(x)).flatten(0, 1), following.flatten())


def draw(text: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - asked.context - 1, (asked.batch,), generator=rng).tolist()
    rows = torch.stack([text[s : s + asked.context + 1] for s in starts]).long()
    rows = rows.to(device, non_blocking=True)
    return rows[:, :-1], rows[:, 1:]


def rate_at(step: int) -> float:
    warm = min(1.0, (step + 1) / 10)
    return asked.rate * warm * (0.55 + 0.45 * math.cos(math.pi * step / asked.steps))


@torch.no_grad()
def judge(model: nn.Module) -> float:
    rng = torch.Generator().manual_seed(7)
    model.eval()
    losses = [model(*draw(held_out, rng)).item() for _ in range(4)]
    model.train()
    return sum(losses) / len(losses)


device = torch.device(asked.device)
if device.type == "cuda":
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
rank, size = dist.get_rank(), dist.get_world_size()
library = b"".join(p.read_bytes() for p in sorted(Path(json.__file__).parents[1].glob("*.py"))[:40])
text = torch.frombuffer(bytearray(library), dtype=torch.uint8)
training, held_out = text[: -len(text) // 10], text[-len(text) // 10 :]

torch.manual_seed(1337)
rng = torch.Generator().manual_seed(1337 + rank)
plain = Reader(asked.width, asked.context).to(device)
model = DistributedDataParallel(plain)
hook = gossamer.ddp.register(model)  # <- gossamer: the recipe comes from the environment
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])

for step in range(asked.steps):
    for group in optimizer.param_groups:
        group["lr"] = rate_at(step)
    total = 0.0
    for micro in range(asked.accumulate):
        with nullcontext() if micro == asked.accumulate - 1 else model.no_sync():
            with torch.autocast(device.type, torch.bfloat16, enabled=asked.half):
                loss = model(*draw(training, rng)) / asked.accumulate
            loss.backward()
            total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    last = step == asked.steps - 1
    quality = judge(plain) if last or (step + 1) % asked.judge_every == 0 else None
    hook.log(loss=total, held_out=quality)  # <- gossamer: what recipes are compared by
    if rank == 0 and quality is not None:
        print(f"step {step + 1}: loss {total:.4f}, held out {quality:.4f}")
        if asked.checkpoint:
            torch.save(
                {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, asked.checkpoint
            )
hook.close()
dist.destroy_process_group()
