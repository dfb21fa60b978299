"""Ranks that are not set up alike learn what differs, all of them, before the first step; nobody waits for ever."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gang import Gang
from tests.integrations.loops import Awkward, attached, flat, sgd, small_step
from tests.marked import SLACK
from torch import nn

import gossamer
from gossamer.core import verbs
from gossamer.core.errors import AttachError, PeerError
from gossamer.fabrics.torch.fabric import TorchFabric
from gossamer.integrations.handshake import WORDS, agree

pytestmark = pytest.mark.gang


class Wide(nn.Linear):
    def __init__(self, *buffers: str) -> None:
        super().__init__(17, 7)
        for name in buffers:
            self.register_buffer(name, torch.zeros(2))


def two_rates(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.2}], lr=0.1)


def frozen(model: nn.Module) -> nn.Module:
    model.bias.requires_grad_(False)
    return model


CASES: dict[str, tuple[Any, Any, tuple[str, ...]]] = {  # what rank 0 says, what rank 1 says, what all read
    "recipe": (
        {},
        {"recipe": "qsgd"},
        ("recipe: 'scatter(ternary(), answer=qsgd(bits=3))' on rank(s) 0; 'scatter(qsgd(bucket=128))' on rank(s) 1",),
    ),
    "seed": ({}, {"seed": 4}, ("seed: 3 on rank(s) 0; 4 on rank(s) 1",)),
    "deadline": ({}, {"deadline": 21.0}, ("deadline",)),
    "shape": (
        {},
        {"model": lambda: nn.Linear(17, 8)},
        ("parameter weight: 'float32 (7, 17)' on rank(s) 0; 'float32 (8, 17)'",),
    ),
    "dtype": (
        {},
        {"model": lambda: nn.Linear(17, 7).double()},
        ("parameter bias: 'float32 (7,)'", "'float64 (7,)' on rank(s) 1"),
    ),
    "layers": (
        {},
        {"model": lambda: nn.Sequential(nn.Linear(17, 7), nn.ReLU())},
        ("parameter weight", "parameter 0.weight: missing"),
    ),
    "options": (
        {},
        {"find_unused_parameters": True},
        ("find_unused_parameters: False on rank(s) 0; True on rank(s) 1",),
    ),
    "rates": ({}, {"optimizer": two_rates}, ("the optimizer's group 1: missing on rank(s) 0",)),
    "buffers": (
        {"model": lambda: Wide("a")},
        {"model": lambda: Wide("a", "b")},
        ("frozen parameter or buffer b: missing on rank(s) 0",),
    ),
    "freezing": (
        {},
        {"model": lambda: frozen(nn.Linear(17, 7))},
        ("frozen parameter or buffer bias: missing on rank(s) 0",),
    ),
}


def disagreeing(rank: int, size: int, case: str) -> tuple[str, bool]:
    usual = {"recipe": "terngrad", "model": lambda: nn.Linear(17, 7)}
    mine = usual | CASES[case][min(rank, 1)]
    model = mine.pop("model")()
    before = flat(model)
    with pytest.raises(PeerError) as caught, attached(mine.pop("recipe"), model, **mine):
        pass
    return str(caught.value), torch.equal(before, flat(model))


@pytest.mark.parametrize("case", CASES)
def test_what_differs_is_said_on_every_rank(gang2: Gang, case: str) -> None:
    texts = gang2.run(disagreeing, case)
    for text, untouched in texts:
        assert all(words in text for words in CASES[case][2]), text
        assert untouched
    if case != "deadline":  # that one is noticed before anything is gathered
        assert texts[0] == texts[1]


def test_of_four_ranks_the_odd_one_is_named(gang4: Gang) -> None:
    for text, _ in gang4.run(disagreeing, "recipe"):
        assert (
            "'scatter(ternary(), answer=qsgd(bits=3))' on rank(s) 0; 'scatter(qsgd(bucket=128))' on rank(s) 1, 2, 3"
            in text
        )


def different_weights(rank: int, size: int) -> list[torch.Tensor]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(17, 9), nn.BatchNorm1d(9), nn.Linear(9, 7).to(torch.bfloat16).float())
    model[1].running_mean.fill_(float(rank))
    model[0].requires_grad_(False)
    with attached("qsgd", model):
        return [t.clone() for t in model.state_dict().values()]


def test_everybody_starts_from_rank_0(gang4: Gang) -> None:
    states = gang4.run(different_weights)
    torch.manual_seed(0)
    assert torch.equal(states[0][0], nn.Linear(17, 9).weight)
    assert all(torch.equal(a, b) for mine in states for a, b in zip(mine, states[0], strict=True))


def one_cannot(rank: int, size: int, unable: dict[int, str]) -> tuple[str, str, float]:
    """Every rank looks for itself whether it can go on."""
    fabric = TorchFabric(deadline=20.0)
    mine = AttachError(unable[rank]) if rank in unable else None
    try:
        fabric.run(agree(mine, torch.device("cpu")))
        kind, text = "", "all can go on"
    except gossamer.GossamerError as error:
        kind, text = type(error).__name__, str(error)
    total = float(fabric.run(verbs.all_reduce(torch.ones(1))))  # nothing is lost by it
    fabric.close()
    return kind, text, total


def test_what_one_rank_cannot_do_is_an_error_on_all(gang4: Gang) -> None:
    assert gang4.run(one_cannot, {}) == [("", "all can go on", 4.0)] * 4
    outcomes = gang4.run(one_cannot, {2: "no scaler was given: 10 \u03bcs"})
    assert outcomes[2] == ("AttachError", "no scaler was given: 10 \u03bcs", 4.0)
    others = ("PeerError", "rank 2 cannot go on: no scaler was given: 10 \u03bcs", 4.0)
    assert [outcomes[r] for r in (0, 1, 3)] == [others] * 3


def test_several_ranks_that_cannot_go_on_are_all_named_and_long_words_are_cut(gang4: Gang) -> None:
    outcomes = gang4.run(one_cannot, {1: "", 3: "x" * 10_000})
    assert outcomes[1][:2] == ("AttachError", "")
    assert outcomes[3][:2] == ("AttachError", "x" * 10_000)
    for rank in (0, 2):
        assert outcomes[rank][1] == f"rank 1 cannot go on: AttachError; rank 3 cannot go on: {'x' * WORDS}"


def lonely(rank: int, size: int, absent: int) -> tuple[str, float] | None:
    model, outcome = Awkward(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach = gossamer.attach  # what takes seconds to load is loaded before anybody waits for a second only
    dist.barrier()
    if rank != absent:
        began = time.monotonic()
        with pytest.raises(PeerError) as caught:
            attach(model, optimizer, "qsgd", deadline=1.0)
        outcome = str(caught.value), time.monotonic() - began
    dist.barrier()  # it stays away until all others have given up
    return outcome


def test_peers_that_never_come_are_named_in_time() -> None:
    gang = Gang(3)
    try:
        outcomes = gang.run(lonely, 1)
    finally:
        gang.close()
    for rank in (0, 2):
        text, seconds = outcomes[rank]
        assert "No answer from rank 1:" in text
        assert seconds < 1.0 + 2.0 + SLACK


def in_part(rank: int, size: int, how: str) -> torch.Tensor | None:
    """Ranks 1 and 3 train by themselves; the others do not take part."""
    from torch.distributed.device_mesh import init_device_mesh

    if how == "mesh":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "host"))
        group: Any = mesh["site"]  # ranks 0 and 2, ranks 1 and 3
    else:
        group = dist.new_group([1, 3])
        if rank not in (1, 3):
            return None
    with attached("qsgd", process_group=group) as (model, optimizer, comm):
        assert comm.fabric.size == 2
        for _ in range(3):
            small_step(model, optimizer, comm, rank)
        comm.check_sync()
        if how == "mesh":
            with pytest.raises(gossamer.GossamerError, match="2 dimensions"):
                gossamer.attach(other := nn.Linear(2, 2), sgd(other), "qsgd", mesh)
        return flat(model)


@pytest.mark.parametrize("how", ["group", "mesh"])
def test_a_group_of_some_ranks_trains_by_itself(gang4: Gang, how: str) -> None:
    models = gang4.run(in_part, how)
    assert torch.equal(models[1], models[3])
    if how == "mesh":
        assert torch.equal(models[0], models[2])
        assert not torch.equal(models[0], models[1])
