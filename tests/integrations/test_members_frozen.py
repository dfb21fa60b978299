"""What comes back has the others' frozen layers and buffers, whatever it was started with."""

import os
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
import torch
from tests.integrations.test_members import DIES_AT, Learners, die_at, hold, is_enough, made_by
from tests.marked import wait_for
from torch import nn

import gossamer
from gossamer.core.errors import GossamerError
from gossamer.fabrics.liveness.members import Members

pytestmark = pytest.mark.gang

WIDER = "wider"


class OnABase(nn.Module):
    """A trained layer on a frozen one; statistics that run, and a table that does not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(8, width).requires_grad_(False)
        self.norm, self.head = nn.BatchNorm1d(width), nn.Linear(width, 1)
        self.register_buffer("table", torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.base(x)).tanh() + self.table)

    def __getitem__(self, index: int) -> nn.Module:
        return self.norm


def learn_on_a_base(rank: int, size: int, port: int, recipe: str, silence: float, how: str, pipe: Connection) -> None:
    """A user's loop on a model that is another one at every start."""
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    group = gossamer.members(silence)
    model = OnABase(5 if how == WIDER else 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            comm = gossamer.attach(model, optimizer, recipe, group, deadline=30.0, buffers="local")
            fixed = {n: t.tolist() for n, t in model.state_dict().items() if n.startswith(("base", "table"))}
            told = [str(w.message) for w in caught if w.category is RuntimeWarning]
            pipe.send((fixed, int(model.norm.num_batches_tracked), bool(model.norm.running_mean.any()), told))
            if how == "dies":
                die_at("computing", comm)
            while comm.step < 2 * DIES_AT or not is_enough(group):
                x = torch.randn(4, 8)
                optimizer.zero_grad()
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
            comm.finish()
        pipe.send({n: t.tolist() for n, t in model.state_dict().items()})
    except GossamerError as error:
        pipe.send(error)


@pytest.fixture
def learners() -> Iterator[Callable[..., Learners]]:
    yield from made_by(loop=learn_on_a_base)


def test_who_comes_back_gets_the_frozen_layers_and_buffers_of_the_others(learners: Callable[..., Learners]) -> None:
    store = hold()
    crew, everybody = learners(3, store.port, "decoupled_diloco(4)"), Members(store, 0, 3)
    for rank in range(3):
        crew.start(rank, dies="dies" if rank == 1 else "")
    (fixed, *_), *_ = [crew.hear(rank) for rank in range(3)]
    crew.processes[1].join(300.0)
    wait_for(lambda: everybody.latest().ranks == (0, 2))
    crew.start(1)
    came, batches, has_run, told = crew.hear(1)
    assert came == fixed
    assert batches >= DIES_AT
    assert has_run
    assert any("'base.weight', 'base.bias'" in t and "differ" in t for t in told)
    everybody.store.raise_flag("enough", "")
    ends = [crew.hear(rank) for rank in range(3)]
    trained = [n for n in ends[0] if n.startswith("head")]
    for end in ends:
        assert {n: end[n] for n in fixed} == fixed
        assert {n: end[n] for n in trained} == {n: ends[0][n] for n in trained}


def test_who_comes_back_with_a_frozen_layer_of_another_shape_is_refused_by_name(
    learners: Callable[..., Learners],
) -> None:
    store = hold()
    crew, everybody = learners(2, store.port, "decoupled_diloco(4)"), Members(store, 0, 2)
    for rank in range(2):
        crew.start(rank, dies="dies" if rank == 1 else "")
    for rank in range(2):
        crew.hear(rank)
    crew.processes[1].join(300.0)
    wait_for(lambda: everybody.latest().ranks == (0,))
    crew.start(1, dies=WIDER)
    refused = crew.hear(1)
    assert isinstance(refused, GossamerError)
    assert "frozen parameter or buffer base.weight: 'float32 (4, 8)' on rank(s) 0; 'float32 (5, 8)'" in str(refused)
