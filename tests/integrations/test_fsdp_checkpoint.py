"""Checkpoints of models that FSDP2 shards: resumed to the bit, and cut into other numbers of shards and replicas."""

import json
import os
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.gang import Call, Gang, at_once
from tests.integrations.loops import DEADLINE, same
from tests.integrations.sharded import adamw, attached, dense, full, loss_of, mesh_of
from tests.marked import SLACK
from torch import Tensor, nn

import gossamer
from gossamer.checkpoints.folder import Folder
from gossamer.checkpoints.manifest import describe
from gossamer.checkpoints.sharded import read
from gossamer.core.errors import CheckpointError, PeerError
from gossamer.runtime import local_part

pytestmark = [
    pytest.mark.gang,
    pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP2 trains on processors since torch 2.13"),
]

save, load = gossamer.checkpoint.save, gossamer.checkpoint.load
RECIPES = ["allreduce", "topk(ratio=0.1)", "powersgd", "allreduce + slowmo(4)", "local_sgd(4)", "sgp"]


@pytest.fixture(scope="module")
def gang6() -> Iterator[Gang]:
    gang = Gang(6)
    yield gang
    gang.close()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, comm: Any) -> None:
    optimizer.zero_grad()
    loss_of(model, comm.rank, comm.step + 1, comm.worker.replica.index).backward()
    optimizer.step()


def parts(model: nn.Module) -> Tensor:
    """What this rank holds, bit by bit."""
    return torch.cat([local_part(p.detach()).reshape(-1).clone() for p in model.parameters()])


def resumed(rank: int, size: int, recipe: str, path: str, saved: tuple[int, ...], last: int) -> list[list[Tensor]]:
    """What each rank holds after each step: of a whole run, and of runs that go on from its checkpoints."""
    mesh, whole = mesh_of(2), list[Tensor]()
    with attached(recipe, mesh, adamw) as (model, optimizer, comm):
        while comm.step < last:
            step(model, optimizer, comm)
            whole.append(parts(model))
            if comm.step in saved:
                save(comm, f"{path}/{comm.step}", {"epoch": comm.step}, wait=comm.step % 2 == 0)
    out = [whole]
    for after in saved:
        out.append(whole[:after])
        with attached(recipe, mesh, adamw, seed=99) as (model, optimizer, comm):
            assert load(comm, f"{path}/{after}") == {"epoch": after}
            assert same(parts(model), whole[after - 1])
            while comm.step < last:
                step(model, optimizer, comm)
                out[-1].append(parts(model))
    return out


def check_resumed(gang: Gang, recipe: str, path: Path, saved: tuple[int, ...], last: int) -> None:
    for whole, *runs in gang.run(resumed, recipe, str(path), saved, last, timeout=300.0):
        for after, run in zip(saved, runs, strict=True):
            assert len(run) == len(whole) == last
            assert all(map(same, run, whole)), f"saved after step {after}"


@pytest.mark.parametrize("recipe", ["topk(ratio=0.1)", "allreduce + slowmo(2)"])
def test_a_sharded_run_goes_on_to_the_bit(gang4: Gang, recipe: str, tmp_path: Path) -> None:
    check_resumed(gang4, recipe, tmp_path, (1, 2), 4)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_does_so_after_every_step_of_two_rounds(gang4: Gang, recipe: str, tmp_path: Path) -> None:
    check_resumed(gang4, recipe, tmp_path, tuple(range(1, 9)), 10)


# -- other numbers of shards and replicas ----------------------------------------------------------------------------------

MEMORIES = ["topk(ratio=0.1)", "topk(ratio=0.2) + local_sgd(3)"]
Kept = dict[str, Tensor]  # whole tensors, by name


def whole_by_parameter(comm: Any, local: dict[str, Tensor]) -> Kept:
    """Whole tensors from the parts of all shards."""
    from gossamer.runtime.params import whole_of

    found = Kept()
    for name, part in local.items():
        p = comm.worker.params[name].parameter
        found[name] = full(whole_of(part.view(local_part(p).shape), p)) if hasattr(p, "placements") else part.clone()
    return found


def kept(model: nn.Module, optimizer: torch.optim.Optimizer, comm: Any) -> dict[str, Kept]:
    """Models, momenta and residuals of this rank's replica, whole."""
    residuals = {
        key.split("/", 3)[3]: value
        for key, value in comm.state_dict().items()
        if isinstance(value, Tensor) and key.startswith(f"rank{comm.rank}/memory/residual/")
    }
    states: dict[Any, Any] = optimizer.state
    return {
        "model": {name: full(p) for name, p in model.named_parameters()},
        "exp_avg": {name: full(states[p]["exp_avg"]) for name, p in model.named_parameters()},
        "residual": whole_by_parameter(comm, residuals),
    }


def first_save(rank: int, size: int, recipe: str, path: str, shards: int, one_dimension: bool = False) -> Any:
    with attached(recipe, mesh_of(shards), adamw, one_dimension=one_dimension) as (model, optimizer, comm):
        for _ in range(4):
            step(model, optimizer, comm)
        save(comm, path, {"epoch": 4})
        found = kept(model, optimizer, comm)
        with comm.consensus():
            public = {name: full(p) for name, p in model.named_parameters()}
        return comm.rank, found, public


def load_again(rank: int, size: int, recipe: str, path: str, shards: int, onto: str = "") -> Any:
    """Onto other shards; saved again from there, if asked to."""
    with attached(recipe, mesh_of(shards), adamw, seed=99) as (model, optimizer, comm):
        step(model, optimizer, comm)  # the optimizer has state of its own, which is replaced
        assert load(comm, path, strict=True) == {"epoch": 4}
        assert comm.step == 4
        if onto:
            save(comm, onto, {"epoch": 4})
        found = kept(model, optimizer, comm)
        step(model, optimizer, comm)
        return comm.rank, found, None


def load_dense(rank: int, size: int, recipe: str, path: str, onto: str = "") -> Any:
    torch.manual_seed(rank)
    model = dense()
    optimizer = adamw(model)
    with gossamer.attach(model, optimizer, recipe, seed=99, deadline=DEADLINE) as comm:
        loss_of(model, rank, 1).backward()
        optimizer.step()
        assert load(comm, path, strict=True) == {"epoch": 4}
        if onto:
            save(comm, onto, {"epoch": 4})
        found = kept(model, optimizer, comm)
        optimizer.zero_grad()
        loss_of(model, rank, comm.step + 1).backward()
        optimizer.step()
        return rank, found, None


def by_replica(answers: list[Any]) -> list[dict[str, Kept]]:
    """What each replica holds; its ranks say the same."""
    found = dict[int, dict[str, Kept]]()
    for replica, held, _ in answers:
        known = found.setdefault(replica, held)
        assert all(torch.equal(known[what][name], held[what][name]) for what in held for name in held[what])
    return [found[replica] for replica in sorted(found)]


def assert_equal(one: dict[str, Kept], other: dict[str, Kept]) -> None:
    for what, tensors in one.items():
        assert tensors.keys() == other[what].keys()
        for name, tensor in tensors.items():
            assert same(tensor, other[what][name]), f"{what} of {name}"


@pytest.mark.parametrize("recipe", MEMORIES)
def test_shards_are_cut_anew_to_the_bit(gang4: Gang, gang6: Gang, gang2: Gang, recipe: str, tmp_path: Path) -> None:
    """Two replicas of 2 shards, of 3, of whole models, and of 2 again: models, momenta and residuals are the same."""
    two, three, one = (str(tmp_path / name) for name in ("two", "three", "one"))
    began = by_replica(gang4.run(first_save, recipe, two, 2))
    assert any(t.any() for held in began for t in held["residual"].values())
    for runs in (
        gang6.run(load_again, recipe, two, 3, three),
        gang2.run(load_dense, recipe, three, one),
        gang4.run(load_again, recipe, one, 2),
    ):
        found = by_replica(runs)
        assert len(found) == 2
        for before, after in zip(began, found, strict=True):
            assert_equal(before, after)


def test_another_number_of_replicas_starts_from_the_consensus(gang4: Gang, gang6: Gang, tmp_path: Path) -> None:
    """From 2 x 2 to 3 x 2: residuals keep their mean over replicas, so what is owed to the model is kept."""
    recipe, path = MEMORIES[0], str(tmp_path / "two")
    answers = gang4.run(first_save, recipe, path, 2)
    began, public = by_replica(answers), answers[0][2]
    found = by_replica(gang6.run(load_again, recipe, path, 2))
    assert len(found) == 3
    for held in found:
        assert all(torch.equal(held["model"][name], public[name]) for name in public)
    for name in public:
        before = torch.stack([held["residual"][name] for held in began]).double().mean(0)
        after = torch.stack([held["residual"][name] for held in found]).double().mean(0)
        assert torch.allclose(before, after, atol=1e-7)


def test_a_mesh_of_one_dimension_saves_the_same(gang4: Gang, gang6: Gang, tmp_path: Path) -> None:
    path = str(tmp_path / "two")
    began = by_replica(gang4.run(first_save, MEMORIES[1], path, 2, True))
    for before, after in zip(began, by_replica(gang6.run(load_again, MEMORIES[1], path, 3)), strict=True):
        assert_equal(before, after)


def test_the_model_in_it_is_read_by_torch_alone(gang4: Gang, tmp_path: Path) -> None:
    path = tmp_path / "two"
    public = gang4.run(first_save, "local_sgd(3)", str(path), 2)[0][2]
    state = {name: torch.zeros_like(t) for name, t in dense().state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of a process without a group
        dcp.load({"model": state}, checkpoint_id=path)
    assert state.keys() == public.keys()
    assert all(same(state[name], public[name]) for name in public)
    names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    assert len(names["model.0.weight"].chunks) == 2  # type: ignore[union-attr]
    assert "own.replica1/model/0.weight" in names


FACTORS = "powersgd(rank=1)"


def begun_anew(rank: int, size: int, path: str, shards: int) -> tuple[str, list[str]]:
    """What is refused with `strict`, and what is warned of without."""
    refused = ""
    with attached(FACTORS, mesh_of(shards), adamw) as (model, optimizer, comm):
        try:
            load(comm, path, strict=True)
        except CheckpointError as error:
            refused = str(error)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            load(comm, path)
        for _ in range(2):
            step(model, optimizer, comm)
        comm.check_sync()
        return refused, [str(w.message) for w in heard if "shard" in str(w.message)]


def test_what_cannot_be_cut_is_named_or_refused(gang4: Gang, gang6: Gang, tmp_path: Path) -> None:
    path = str(tmp_path / "two")
    gang4.run(first_save, FACTORS, path, 2)
    what = "the checkpoint is of 2 shard(s) per replica, and this run has 3: exchange/q cannot be cut into other shards"
    for refused, warned in gang6.run(begun_anew, path, 3):
        assert refused == f"{what}; load it with 2 shard(s), or without strict=True"
        assert warned == [f"{what}, and begins anew"]
    assert gang4.run(begun_anew, path, 2) == [("", [])] * 4


def anchored(rank: int, size: int, path: str, shards: int, saves: bool) -> list[list[Tensor]]:
    """Each rank keeps a part of its shard's anchor and slow momentum: whole models after more steps."""
    models = list[list[Tensor]]()
    with attached("allreduce + slowmo(2, sharded=True)", mesh_of(shards), adamw) as (model, optimizer, comm):
        if saves:
            for _ in range(3):
                whole_step(model, optimizer, comm)
            save(comm, path)
        else:
            load(comm, path, strict=True)
        while comm.step < 6:
            whole_step(model, optimizer, comm)
            models.append([full(p) for p in model.parameters()])
    return models


def whole_step(model: nn.Module, optimizer: torch.optim.Optimizer, comm: Any) -> None:
    """On equal data for all shards: any number of them computes the same, but for the order of sums."""
    optimizer.zero_grad()
    loss_of(model, comm.rank, comm.step + 1).backward()
    optimizer.step()


def test_state_of_which_each_rank_keeps_a_part_is_cut_anew(gang4: Gang, gang6: Gang, tmp_path: Path) -> None:
    path = str(tmp_path / "two")
    (went_on, *_), (moved, *_) = gang4.run(anchored, path, 2, True), gang6.run(anchored, path, 3, False)
    assert len(went_on) == len(moved) == 3
    for before, after in zip(went_on, moved, strict=True):
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(before, after, strict=True))


IN_FLIGHT = "osgp(every=2)"


def in_flight(rank: int, size: int, path: str, shards: int, saves: bool) -> str:
    with attached(IN_FLIGHT, mesh_of(shards)) as (model, optimizer, comm):
        if saves:
            for _ in range(3):
                step(model, optimizer, comm)
            save(comm, path)
            return ""
        with pytest.raises(CheckpointError) as refused:
            load(comm, path)
        return str(refused.value)


def test_messages_in_flight_are_not_dropped(gang4: Gang, gang6: Gang, tmp_path: Path) -> None:
    gang4.run(in_flight, str(tmp_path / "two"), 2, True)
    for said in gang6.run(in_flight, str(tmp_path / "two"), 3, False):
        assert "messages were in flight when the checkpoint was saved, which cannot be cut into other shards" in said
        assert "load it with 2 shard(s) per replica, train to a step without messages in flight, and save again" in said


# -- what goes wrong -------------------------------------------------------------------------------------------------------


def refuses(rank: int, size: int, path: str) -> str:
    with attached(MEMORIES[0], mesh_of(2), adamw) as (model, optimizer, comm):
        before = parts(model)
        with pytest.raises(CheckpointError) as refused:
            load(comm, path)
        assert comm.step == 0
        assert same(parts(model), before)
        step(model, optimizer, comm)
        return str(refused.value)


def test_a_damaged_chunk_is_refused_on_all_ranks(gang4: Gang, tmp_path: Path) -> None:
    gang4.run(first_save, MEMORIES[0], str(tmp_path / "two"), 2)
    file = tmp_path / "two" / "__3_0.distcp"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 3] ^= 1
    file.write_bytes(raw)
    for said in gang4.run(refuses, str(tmp_path / "two")):
        assert str(tmp_path / "two") in said
        assert "damaged" in said


def cannot_write(rank: int, size: int, path: str) -> str:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    write_data = FileSystemWriter.write_data

    def full_disk(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with attached(MEMORIES[0], mesh_of(2)) as (model, optimizer, comm):
        step(model, optimizer, comm)
        if rank == 3:
            FileSystemWriter.write_data = full_disk  # type: ignore[method-assign]
        saving = save(comm, f"{path}/a", wait=False)
        with pytest.raises(CheckpointError) as refused:
            saving.wait()
        FileSystemWriter.write_data = write_data  # type: ignore[method-assign]
        save(comm, f"{path}/b", wait=False).wait()
        return str(refused.value)


def test_what_fails_on_one_shard_fails_on_all_ranks(gang4: Gang, tmp_path: Path) -> None:
    for said in gang4.run(cannot_write, str(tmp_path)):
        assert said.startswith(f"rank 3 cannot write to {tmp_path}/a: [Errno 28] No space left on device")
    assert [p.parent.name for p in tmp_path.glob("*/.metadata")] == ["b"]


def struck(rank: int, size: int, path: str, victim: int) -> tuple[str, float, str]:
    """The victim dies in its thread that writes. Ranks of other replicas and other shards are told as well."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    def hit(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    with suppress(PeerError), attached(MEMORIES[0], mesh_of(2), deadline=3.0) as (model, optimizer, comm):
        step(model, optimizer, comm)
        if rank == victim:
            FileSystemWriter.write_data = hit  # type: ignore[method-assign]
        saving = save(comm, path, wait=False)
        if rank == victim:
            time.sleep(60)
        began = time.monotonic()
        with pytest.raises(PeerError) as told:
            saving.wait()
        waited = time.monotonic() - began
    with pytest.raises(CheckpointError) as refused:
        Folder(path)
    return str(told.value), waited, str(refused.value)


def test_a_rank_that_dies_while_shards_are_written_is_noticed_by_all(tmp_path: Path) -> None:
    with at_once(4, {3: Call(struck, (str(tmp_path), 3), (3,))}) as outcome_of:
        for text, waited, refused in outcome_of(3)[:3]:
            assert "'checkpoint.save'" in text
            assert "load the checkpoint before it" in text
            assert waited < 2 * (3.0 + 2.0) + SLACK
            assert "not a finished distributed checkpoint" in refused


class Held(dict[str, Any]):
    """Stands for a folder: what it holds by name."""

    path = "runs/7"

    def read(self, name: str) -> Any:
        return self[name]


NUMBER = describe(3)
DAMAGED = {
    "it says that a replica had 0 shards": {"shards": 0},
    "it does not hold 'replica0/shard1/contents'": {"shards": 2, "replica0/shard0/contents": "{}"},
    "'rank0/contents' cannot be read": {"rank0/contents": "[1"},
    "'rank0/lag' is missing": {"rank0/contents": json.dumps({"rank0/lag": NUMBER})},
    "'rank0/lag' is not what was saved": {"rank0/contents": json.dumps({"rank0/lag": NUMBER}), "rank0/lag": 4},
    "'rank0/anchor/left' is not a piece of a parameter of this model": {
        "shards": 2,
        "replica0/shard0/contents": json.dumps({"rank0/anchor/left@0": NUMBER}),
        "replica0/shard1/contents": "{}",
        "replica0/shard0/anchor/left@0": 3,
    },
}


@pytest.mark.parametrize("words", DAMAGED)
def test_what_is_missing_or_changed_in_a_folder_is_named(words: str) -> None:
    worker: Any = SimpleNamespace(replica=SimpleNamespace(size=1, index=0), params={})
    folder: Any = Held(DAMAGED[words])
    with pytest.raises(CheckpointError) as refused:
        read(folder, "", worker, [0], strict=False)
    assert str(refused.value) == f"runs/7 is damaged: {words}"
