"""The loop of nanoGPT's train.py: micro-batches, a switched-off scaler, clipping, AdamW in two groups, a cosine rate."""

import math
from collections.abc import Sequence

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import same
from tests.others.both import SYNCHRONOUS, attach, both, close, ours, randint, settled
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = pytest.mark.gang

VOCABULARY, CONTEXT, WIDTH = 17, 8, 16
ITERATIONS, MICRO = 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The word embedding is the output layer's weight too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1337)
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.AdamW:
        decay = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(
            groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-5
        )  # else noise decides where there is no gradient


def get_batch(ranks: Sequence[int], number: int) -> tuple[Tensor, Tensor]:
    tokens = randint(ranks, number, VOCABULARY, 2, CONTEXT + 1)
    return tokens[:, :-1], tokens[:, 1:]


def nanogpt(ranks: Sequence[int], recipe: str | None, iterations: int = ITERATIONS) -> list[nn.Module]:
    model = GPT()
    optimizer = model.configure_optimizers()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    comm = attach(model, optimizer, recipe, scaler=scaler)
    number = 0
    for iteration in range(iterations):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (0.1 + 0.45 * (1 + math.cos(math.pi * iteration / iterations)))
        for micro_step in range(MICRO):
            model.require_backward_grad_sync = micro_step == MICRO - 1  # as train.py has it, in place of no_sync()
            _, loss = model(*get_batch(ranks, number))
            scaler.scale(loss / MICRO).backward()
            number += 1
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    settled(comm, iterations)
    comm.detach()
    return [model]


def test_nanogpt_is_one_process_on_both_ranks_data(gang2: Gang) -> None:
    for together, alone in gang2.run(both, nanogpt):
        close(together, alone)


@pytest.mark.parametrize("recipe", [*SYNCHRONOUS[1:], "local_sgd(2)"])
def test_nanogpt_ends_with_equal_models_under_other_recipes(gang2: Gang, recipe: str) -> None:
    (first,), (second,) = gang2.run(ours, nanogpt, recipe)
    assert same(first, second)
    assert first.isfinite().all()
