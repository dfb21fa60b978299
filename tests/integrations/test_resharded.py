"""Checkpoints of models that FSDP2 shards move to other shards, other replicas and whole models, also where replicas differ."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.gang import Gang
from tests.integrations import sharded
from tests.integrations.loops import DEADLINE, same
from tests.integrations.sharded import adamw, dense, full, loss_of, mesh_of, sgd
from torch import Tensor, nn

import gossamer
from gossamer.checkpoints.folder import Folder
from gossamer.integrations import Communicator

pytestmark = [
    pytest.mark.gang,
    pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP2 trains on processors since torch 2.13"),
]
save, load = gossamer.checkpoint.save, gossamer.checkpoint.load
Residuals = dict[str, Tensor]


@pytest.fixture(scope="module")
def gang6() -> Iterator[Gang]:
    gang = Gang(6)
    yield gang
    gang.close()


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator, replica: int) -> None:
    optimizer.zero_grad()
    loss_of(model, replica, comm.step + 1).backward()
    optimizer.step()


# -- other shards and replicas --------------------------------------------------------------------------------------------


def memories(comm: Communicator) -> Residuals:
    """This rank's own entries of the communicator's state: its part of each parameter's."""
    own = f"rank{comm.rank}/"
    return {
        key.removeprefix(own): value
        for key, value in comm.state_dict().items()
        if key.startswith(own) and isinstance(value, Tensor)
    }


def momenta(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [full(v) for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]


Seen = tuple[dict[str, Any], list[Tensor], list[Tensor], Residuals]


def seen_of(model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator) -> Seen:
    """The replica's whole parameters and momenta, and this rank's memories."""
    found = memories(comm)
    return {"step": comm.step}, [full(p) for p in model.parameters()], momenta(optimizer), found


def begun(rank: int, size: int, recipe: str, path: str) -> Seen:
    with sharded.attached(recipe, mesh_of(2), adamw) as (model, optimizer, comm):
        while comm.step < 3:
            one_step(model, optimizer, comm, rank // 2)
        save(comm, path, {"epoch": 3})
        return seen_of(model, optimizer, comm)


def moved(rank: int, size: int, recipe: str, path: str, shards: int, onwards: str = "") -> Seen:
    """What a rank has loaded; saved again where the next gang finds it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*replicate dimension.*is 1")
        with sharded.attached(recipe, mesh_of(shards), adamw, seed=99) as (model, optimizer, comm):
            assert load(comm, path) == {"epoch": 3}
            if onwards:
                save(comm, onwards, {"epoch": 3})
            seen = seen_of(model, optimizer, comm)
            one_step(model, optimizer, comm, rank // shards)
            return seen


def whole_memories(seen: list[Seen], shards: int) -> list[Residuals]:
    """By replica: the ranks' parts of each memory, put together."""
    out = list[Residuals]()
    for first in range(0, len(seen), shards):
        of_shards = [one[3] for one in seen[first : first + shards]]
        out.append({key: torch.cat([part[key].flatten() for part in of_shards if key in part]) for key in of_shards[0]})
    return out


def is_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(same, some, others))


def check_taken_up(seen: list[Seen], shards: int, before: list[Seen]) -> None:
    """Models, momenta and memories of each replica are those of `before`, of 2 shards, to the bit."""
    for rank, (facts, parameters, momenta, _) in enumerate(seen):
        assert facts == {"step": 3}
        assert is_equal(parameters, before[2 * (rank // shards)][1])
        assert is_equal(momenta, before[2 * (rank // shards)][2])
    for found, wanted in zip(whole_memories(seen, shards), whole_memories(before, 2), strict=True):
        assert found.keys() == wanted.keys()
        assert all(same(found[key], wanted[key]) for key in wanted), shards


@pytest.mark.parametrize("recipe", ["topk(ratio=0.1)", "topk(ratio=0.2) + local_sgd(2)"])
def test_other_shards_take_it_up_exactly(gang2: Gang, gang4: Gang, gang6: Gang, recipe: str, tmp_path: Path) -> None:
    """2 replicas of 2, 3 and 1 shards: models, momenta and residuals of each replica, to the bit."""
    two = gang4.run(begun, recipe, str(tmp_path / "two"))
    three = gang6.run(moved, recipe, str(tmp_path / "two"), 3, str(tmp_path / "three"))
    one = gang2.run(moved, recipe, str(tmp_path / "three"), 1, str(tmp_path / "one"))
    back = gang4.run(moved, recipe, str(tmp_path / "one"), 2)
    assert any(memory.abs().sum() > 0 for memory in whole_memories(two, 2)[0].values())
    for seen, shards in (three, 3), (one, 1), (back, 2):
        check_taken_up(seen, shards, two)


def test_other_replicas_start_from_the_consensus_and_owe_what_was_owed(
    gang4: Gang, gang6: Gang, tmp_path: Path
) -> None:
    """2 replicas of 2 shards, then 3 replicas of 2, 1 of 4, and 4 of 1."""
    recipe = "topk(ratio=0.1) + local_sgd(2)"
    two = gang4.run(begun, recipe, str(tmp_path))
    before = whole_memories(two, 2)
    agreed = Folder(tmp_path)
    for gang, shards in (gang6, 2), (gang4, 4), (gang4, 1):
        seen = gang.run(moved, recipe, str(tmp_path), shards)
        for _, parameters, _, _ in seen:
            for (name, _), parameter in zip(dense().named_parameters(), parameters, strict=True):
                assert same(parameter, agreed.read(f"model.{name}"))
        found = whole_memories(seen, shards)
        owed = {key for key in before[0] if key.startswith("memory/")}
        for key in owed:
            mean = torch.stack([one[key].double() for one in before]).mean(0).float()
            assert all(same(one[key], mean) for one in found), key


def saved_simply(rank: int, size: int, recipe: str, path: str, steps: int, wait: bool) -> None:
    with sharded.attached(recipe, mesh_of(2), sgd) as (model, optimizer, comm):
        while comm.step < steps:
            one_step(model, optimizer, comm, rank // 2)
        saving = save(comm, path, {"epoch": 3}, wait=wait)
        one_step(model, optimizer, comm, rank // 2)
        saving.wait()


# -- whole models ---------------------------------------------------------------------------------------------------------


def test_a_plain_script_loads_the_model(gang4: Gang, tmp_path: Path) -> None:
    """Under local steps too, where it is the consensus."""
    gang4.run(saved_simply, "local_sgd(4)", str(tmp_path), 3, False)
    model = dense()
    state = model.state_dict()
    for tensor in state.values():
        tensor.fill_(float("nan"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp.load({"model": state}, checkpoint_id=tmp_path, no_dist=True)
    agreed = Folder(tmp_path)
    for name, tensor in state.items():
        assert bool(torch.isfinite(tensor).all())
        assert same(tensor, agreed.read(f"model.{name}"))


def on_whole_models(rank: int, size: int, recipe: str, path: str, onwards: str = "") -> Seen:
    model = dense()
    optimizer = adamw(model)
    with gossamer.attach(model, optimizer, recipe, seed=99, deadline=DEADLINE) as comm:
        assert load(comm, path) == {"epoch": 3}
        if onwards:
            save(comm, onwards, {"epoch": 3})
        seen = seen_of(model, optimizer, comm)
        one_step(model, optimizer, comm, rank)
        return seen


def test_models_that_are_not_sharded_take_it_up_and_give_it_back(gang2: Gang, gang4: Gang, tmp_path: Path) -> None:
    recipe = "topk(ratio=0.2) + local_sgd(2)"
    two = gang4.run(begun, recipe, str(tmp_path / "sharded"))
    whole = gang2.run(on_whole_models, recipe, str(tmp_path / "sharded"), str(tmp_path / "whole"))
    again = gang4.run(moved, recipe, str(tmp_path / "whole"), 2)
    for seen, shards in (whole, 1), (again, 2):
        check_taken_up(seen, shards, two)
