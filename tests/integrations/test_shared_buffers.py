"""Buffers that ranks share: they travel when they have changed, in their own precision, and no oftener."""

from typing import Any

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import DEADLINE, attached, data, flat, same
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gossamer

pytestmark = pytest.mark.gang


class Attention(nn.Module):
    """As minGPT has it: the causal mask is a buffer of floats."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(context, context)).view(1, 1, context, context))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.qkv(x).split(c, dim=2))
        seen = (q @ k.transpose(-2, -1) / (c // self.heads) ** 0.5).masked_fill(
            self.get_buffer("mask")[:, :, :t, :t] == 0, float("-inf")
        )
        return self.out((seen.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.ln1, self.attention, self.ln2 = nn.LayerNorm(width), Attention(width, heads, context), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 65, width: int = 128, heads: int = 4, context: int = 128) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(1, context, width))
        self.blocks = nn.Sequential(*(Block(width, heads, context) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.words(x) + self.places[:, : x.shape[1]])))
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def language_model(rank: int, size: int, recipe: str) -> tuple[float, float, float, list[str], int]:
    """minGPT-ddp's loop: the bytes of a step, those of its dense gradients, the ratio that metrics tell, what a step asked, in
    its order, and what it takes to judge the model.
    """
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    rng = torch.Generator().manual_seed(rank)
    with gossamer.attach(model, optimizer, recipe, deadline=DEADLINE) as comm:
        before = comm.ledger.sent
        for _ in range(4):
            text = torch.randint(65, (2, 17), generator=rng)
            optimizer.zero_grad(set_to_none=True)
            model(text[:, :-1], text[:, 1:]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        told = comm.metrics()["ratio_to_dense"]
        asked = [e.label for e in comm.ledger.entries if e.step == 4]
        all_steps = comm.ledger.sent
        with comm.consensus():
            judging = comm.ledger.sent - all_steps
        dense = 4.0 * sum(p.numel() for p in model.parameters())
        return (all_steps - before) / 4, dense, told, asked, judging


def test_masks_of_a_language_model_cost_nothing(gang2: Gang) -> None:
    for sent, dense, told, asked, judging in gang2.run(language_model, "qsgd"):
        assert sent <= dense / 7.5
        assert told >= 7.5
        # While backward computes, and before its gradients: when a step ends there is nothing to wait for.
        assert asked[0] == "buffers"
        assert not {"", "buffers"} & {*asked[1:]}
        assert judging == 2  # has either mask changed?


class Masked(nn.Module):
    """A buffer that forward only reads, one that it writes to, and one of another type."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.head = nn.Linear(17, 9), nn.BatchNorm1d(9), nn.Linear(9, 7)
        self.register_buffer("mask", torch.linspace(1, 2, 900).view(100, 9))
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x) * self.get_buffer("mask")[0]
        return self.head(torch.tanh(self.norm(hidden) if self.training else hidden))


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    x, y = data(rank, step)
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()


def written_past_autograd(rank: int, size: int, policy: Any, recipe: str) -> dict[str, Any]:
    """One rank writes to a buffer in a way that autograd does not count."""
    model = Masked().eval()
    with attached(recipe, model, buffers=policy) as (model, optimizer, comm):
        sent = list[int]()
        for step in range(1, 7):
            if step == 3 and rank == 1:
                version = model.mask._version
                model.mask.data[0, 0] = 11.0
                assert model.mask._version == version
            before = comm.ledger.sent
            one_step(model, optimizer, rank, step)
            sent.append(comm.ledger.sent - before)
        comm.check_sync()
        return {"mask": model.mask.clone(), "sent": sent, "flat": flat(model)}


@pytest.mark.parametrize("recipe", ["qsgd", "local_sgd(1)"])
@pytest.mark.parametrize(("policy", "value"), [("average", 6.0), ("broadcast", 1.0)])
def test_what_one_rank_changed_is_sent_by_all_and_then_no_more(
    gang2: Gang, policy: str, value: float, recipe: str
) -> None:
    outcomes = gang2.run(written_past_autograd, policy, recipe)
    assert same(outcomes[0]["mask"], outcomes[1]["mask"])
    assert outcomes[0]["mask"][0, 0] == value
    for one in outcomes:
        first, second, third, fourth, fifth, sixth = one["sent"]
        assert first == second == fifth == sixth
        least = 0 if policy == "broadcast" else 3600
        assert least <= third - first <= 3600 + 100
        assert least <= fourth - first <= 3600 + 100  # it might have gone on changing
    assert sum(one["sent"][2] - one["sent"][0] for one in outcomes) >= 3600


def statistics(rank: int, size: int, policy: Any, steps: int) -> tuple[Tensor, Tensor, list[int], list[str]]:
    with attached("qsgd", Masked(), buffers=policy) as (model, optimizer, comm):
        sent = list[int]()
        for step in range(1, steps + 1):
            before = comm.ledger.sent
            one_step(model, optimizer, rank, step)
            sent.append(comm.ledger.sent - before)
        labels = [e.label for e in comm.ledger.entries if e.step == steps]
        return torch.cat([model.norm.running_mean, model.norm.running_var]), flat(model), sent, labels


def after_rounds(rank: int, size: int, recipe: str) -> Tensor:
    with attached(recipe, Masked(), buffers="average") as (model, optimizer, _):
        for step in range(1, 5):
            one_step(model, optimizer, rank, step)
        return torch.cat([model.norm.running_mean, model.norm.running_var])


@pytest.mark.parametrize("recipe", ["slowmo(2)", "cocod(2)", "easgd(2)", "eager_diloco(2)", "noloco(2)"])
def test_running_statistics_are_shared_at_the_ends_of_rounds(gang2: Gang, recipe: str) -> None:
    assert same(*gang2.run(after_rounds, recipe))


def test_running_statistics_are_means_of_double_precision_and_travel_in_their_own(gang4: Gang) -> None:
    own, shared = gang4.run(statistics, "local", 1), gang4.run(statistics, "average", 1)
    mean = torch.stack([s for s, *_ in own]).double().sum(0) / 4
    assert all(same(s, mean.float()) for s, *_ in shared)

    own, shared = gang4.run(statistics, "local", 4), gang4.run(statistics, "average", 4)
    for (_, trained, _, _), (_, also, _, labels) in zip(own, shared, strict=True):
        assert same(trained, also)
        assert "buffers" not in labels  # ranks ask about those that rest where the others travel
    for step in range(1, 4):
        # 18 numbers to their owners and back, and what each tells each of four buffers, and of the two that travel.
        more = sum(sent[step] for _, _, sent, _ in shared) - sum(sent[step] for _, _, sent, _ in own)
        assert more == 2 * 3 * 72 + 4 * 3 * (4 + 2)


def asks_after_a_meeting(rank: int, size: int) -> tuple[bool, bool]:
    """Whether ranks ask which buffers changed: in a step that some had begun when members met, and in the next one."""
    model = nn.Sequential(nn.Linear(17, 4), nn.BatchNorm1d(4), nn.Linear(4, 7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gossamer.attach(model, optimizer, "local_sgd(1)", buffers="average", deadline=DEADLINE) as comm:
        shared, found = comm._steps.shared, list[bool]()
        one_step(model, optimizer, rank, 1)
        shared.members_changed(False, begun=comm.worker.step)
        for step in (2, 3):
            found.append(next(shared.ask(), None) is not None)
            one_step(model, optimizer, rank, step)
            shared.members_changed(False, begun=comm.worker.step - 1)
        comm.check_sync()
    return found[0], found[1]


def test_nobody_asks_in_a_step_that_some_had_begun_when_members_met(gang2: Gang) -> None:
    assert gang2.run(asks_after_a_meeting) == [(False, True)] * 2
