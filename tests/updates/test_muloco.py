"""Muon inside DiLoCo: the example runs, Muon sees the averaged gradient, and a Muon of vectors is refused."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gang import Gang, free_port
from tests.integrations.loops import DEADLINE, Awkward
from torch import Tensor, nn

import gossamer
from gossamer.core.errors import AttachError

pytestmark = [
    pytest.mark.gang,
    pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon"),
]
EXAMPLE = Path(__file__).parents[2] / "examples" / "muloco.py"
FORKED = Path(__file__).parents[1] / "forked.py"
RECIPE = "diloco(10) + scatter(eden(2)) + error_feedback()"


def test_the_example_learns_and_sends_a_thirtieth() -> None:
    words = [sys.executable, str(FORKED), "2", str(EXAMPLE)]
    env = os.environ | {"STANDALONE_PORT": str(free_port())}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{RECIPE}: loss")
    said = done.stdout.split()
    assert float(said[said.index("loss") + 1]) < 3  # a guess costs 4.16
    assert int(said[said.index("times") - 1]) >= 30


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, 48).view(8, 6))


def gradient(rank: int, step: int) -> Tensor:
    """Multiples of 1/8, of which means of two are exact: what differs below is not the gradient."""
    rng = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(-32, 33, (8, 6), generator=rng).float() / 8


def stepped(ranks: list[int], recipe: str | None) -> Tensor:
    model = Pair()
    muon = torch.optim.Muon(model.parameters(), lr=0.05)
    comm = gossamer.attach(model, muon, recipe, deadline=DEADLINE) if recipe else None
    for step in range(6):
        muon.zero_grad()
        (model.w * torch.stack([gradient(rank, step) for rank in ranks]).mean(0)).sum().backward()
        muon.step()
    if comm is not None:
        comm.check_sync()
        comm.detach()
    return model.w.detach().clone()


def beside_one(rank: int, size: int) -> tuple[Tensor, Tensor]:
    return stepped([rank], "allreduce(fp32())"), stepped([*range(size)], None)


def test_at_every_step_it_is_muon_on_the_mean_gradient_bit_for_bit(gang2: Gang) -> None:
    """And so momenta are of means: Muon's step of a mean is not the mean of Muon's steps."""
    for together, alone in gang2.run(beside_one):
        assert torch.equal(together, alone)


class Muon(torch.optim.SGD):
    """Like the Muons that do not look at shapes themselves."""


def of_vectors(rank: int, size: int) -> str:
    model: Any = Awkward()
    vectors = Muon([p for p in model.parameters() if p.dim() < 2], lr=0.1)
    rest = torch.optim.AdamW([p for p in model.parameters() if p.dim() > 1], lr=0.1)
    with pytest.raises(AttachError) as caught:
        gossamer.attach(model, [vectors, rest], RECIPE, deadline=DEADLINE)
    return str(caught.value)


def test_a_muon_of_vectors_is_refused_on_all_ranks(gang2: Gang) -> None:
    for said in gang2.run(of_vectors):
        assert "Muon without matrices" in said
        assert "attach(model, [muon, adamw], recipe)" in said
