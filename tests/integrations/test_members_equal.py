"""A run with members in which nobody comes or goes is bit-equal to one without."""

from typing import Any

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import SEED
from torch import nn
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

import gossamer
from gossamer.core.hashes import hash_of
from gossamer.fabrics.liveness.members import Members

pytestmark = pytest.mark.gang

STEPS = 14
QUICK = ["allreduce", "qsgd", "topk", "local_sgd(4)"]
LONG = [
    "bf16",
    "terngrad",
    "gather(qsgd(bits=4)) + diana()",
    "gather(topk(ratio=0.2)) + ef21(eta=1.0)",
    "scatter(topk(ratio=0.2)) + error_feedback()",
    "powersgd",
    "dgc(ratio=0.1, momentum=0.0)",
    "allreduce + local_sgd(4, warmup=3)",
    "slowmo(4)",
    "bmuf(4, momentum=0.5)",
    "diloco(4)",
    "sparse_loco(4)",
    "allreduce + streaming(4, fragments=2, delay=3)",
    "allreduce + overlap_local_sgd(4)",
    "qsgd + delayed()",
    "sgp",
    "allreduce + gossip(symmetric())",
]


def trained(rank: int, recipe: str, group: Any, weight: float, buffers: Any) -> list[tuple[int, ...]]:
    """The hashes of all parameters and buffers after each step, and in the end."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.BatchNorm1d(24), nn.Linear(24, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(rank)
    comm = gossamer.attach(model, optimizer, recipe, group, seed=SEED, weight=weight, buffers=buffers)
    seen = list[tuple[int, ...]]()
    for _ in range(STEPS):
        x = torch.randn(6, 8, generator=data)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        seen.append(tuple(map(hash_of, model.state_dict().values())))
    with comm.consensus():
        seen.append(tuple(map(hash_of, model.state_dict().values())))
    comm.finish()
    return [*seen, tuple(map(hash_of, model.state_dict().values()))]


def both(
    rank: int, size: int, port: int, recipes: list[str], weights: list[float], buffers: str
) -> dict[str, tuple[Any, ...]]:
    store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    out = dict[str, tuple[Any, ...]]()
    for recipe in recipes:
        members = Members(PrefixStore(recipe, store), rank, size)
        out[recipe] = tuple(trained(rank, recipe, group, weights[rank], buffers) for group in (None, members))
    return out


def expect_equal(gang: Gang, recipes: list[str], weights: list[float], buffers: str) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for told in gang.run(both, store.port, recipes, weights, buffers):
        for recipe, (without, with_members) in told.items():
            assert without == with_members, recipe
            assert len({*without}) > STEPS / 2  # it did train


def test_with_members_it_is_the_same_run(gang3: Gang) -> None:
    expect_equal(gang3, QUICK, [1.0, 1.0, 1.0], "average")


@pytest.mark.slow
def test_with_members_it_is_the_same_run_under_every_recipe(gang3: Gang) -> None:
    expect_equal(gang3, LONG, [1.0, 1.0, 1.0], "local")


def test_with_members_it_is_the_same_run_under_weights(gang3: Gang) -> None:
    expect_equal(gang3, ["allreduce", "local_sgd(4)"], [1.0, 2.0, 5.0], "average")
