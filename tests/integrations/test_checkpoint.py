"""Checkpoints in one folder: they go on to the bit under every kind of recipe, and what is damaged or hostile is refused."""

import io
import os
import pickle
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.gang import Gang
from tests.integrations.loops import DEADLINE, SEED, SMALL, Awkward, OwnWay, attached, data, flat, same, small_step
from torch import Tensor, nn

import gossamer
from gossamer.core.errors import CheckpointError
from gossamer.integrations import Communicator, checkpoint

gang = pytest.mark.gang
LOOK_AHEAD = "bmuf(2, momentum=0.5, nesterov=True)"  # at a round's end all models are equal, and are not the consensus


class Normed(Awkward):
    """With running statistics, which differ between ranks when they are local."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(17)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def held(model: nn.Module) -> Tensor:
    return torch.cat([t.detach().double().reshape(-1) for t in model.state_dict().values()])


def saved_and_resumed(rank: int, size: int, recipe: str, path: str) -> tuple[list[Tensor], list[Tensor], Any]:
    whole, rest = list[Tensor](), list[Tensor]()
    with attached(recipe, Normed(), adam, buffers="local") as (model, optimizer, comm):
        while comm.step < 9:
            if comm.step == 4:
                checkpoint.save(comm, path, {"epoch": 3, "dice": torch.tensor([rank])})
            small_step(model, optimizer, comm, rank)
            if comm.step > 4:
                whole.append(held(model))
    torch.manual_seed(99 + rank)
    with attached(recipe, Normed(), adam, seed=99, buffers="local") as (model, optimizer, comm):
        extra = checkpoint.load(comm, path)
        while comm.step < 9:
            small_step(model, optimizer, comm, rank)
            rest.append(held(model))
        comm.check_sync()
    return whole, rest, extra


@gang
@pytest.mark.parametrize(
    "recipe",
    [
        "topk(ratio=0.1)" + SMALL,
        "slowmo(3)",
        "sgp(every=3)",
        "osgp(every=2)" + SMALL,
        "qsgd + overlap_local_sgd(3)",
        LOOK_AHEAD,
    ],
)
def test_a_run_goes_on_to_the_bit(gang2: Gang, recipe: str, tmp_path: Path) -> None:
    answers = gang2.run(saved_and_resumed, recipe, str(tmp_path / "step4"))
    for rank, (whole, rest, extra) in enumerate(answers):
        assert len(whole) == len(rest) == 5
        assert all(same(a, b) for a, b in zip(whole, rest))
        assert extra["epoch"] == 3
        assert extra["dice"].tolist() == [rank]


def saved_with_consensus(rank: int, size: int, recipe: str, path: str) -> tuple[Tensor, Tensor, Tensor]:
    with attached(recipe) as (model, optimizer, comm):
        while comm.step < 4:
            small_step(model, optimizer, comm, rank)
        checkpoint.save(comm, path)
        with comm.consensus():
            agreed = flat(model)
        found = Awkward().state_dict()
        dcp.load({"model": found}, checkpoint_id=path)
        return agreed, torch.cat([found[n].reshape(-1) for n, _ in model.named_parameters()]), flat(model)


@gang
@pytest.mark.parametrize(
    "recipe", ["terngrad", "slowmo(3)", "sgp(every=3)", "osgp" + SMALL, "overlap_local_sgd(3)", LOOK_AHEAD]
)
def test_the_model_in_it_is_the_consensus(gang2: Gang, recipe: str, tmp_path: Path) -> None:
    (agreed, found, first), (_, _, second) = gang2.run(saved_with_consensus, recipe, str(tmp_path / "a"))
    assert same(agreed, found)
    assert same(first, second) == (recipe in ("terngrad", LOOK_AHEAD))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("recipe", ["easgd(2)", "eager_diloco(2)", LOOK_AHEAD])
def test_one_rank_alone_stores_the_consensus_and_goes_on_with_its_own_model(recipe: str, tmp_path: Path) -> None:
    agreed, found, own = saved_with_consensus(0, 1, recipe, str(tmp_path / "a"))
    assert same(agreed, found)
    assert not same(found, own)
    with attached(recipe) as (model, _, comm):
        checkpoint.load(comm, tmp_path / "a")
        assert same(flat(model), own)


def saved_only(rank: int, size: int, recipe: str, path: str) -> Tensor:
    with attached(recipe, Awkward(), adam) as (model, optimizer, comm):
        while comm.step < 4:
            small_step(model, optimizer, comm, rank)
        checkpoint.save(comm, path)
        with comm.consensus():
            return flat(model)


def loaded_elsewhere(rank: int, size: int, recipe: str, path: str) -> tuple[Tensor, Tensor, Tensor]:
    with attached(recipe, Awkward(), adam, seed=8) as (model, optimizer, comm):
        checkpoint.load(comm, path)
        begun = flat(model)
        moments = torch.cat([s["exp_avg"].reshape(-1) for s in optimizer.state.values()])
        assert comm.step == 4
        while comm.step < 9:
            small_step(model, optimizer, comm, rank)
        comm.check_sync()
        return begun, moments, flat(model)


@gang
@pytest.mark.parametrize("recipe", ["topk(ratio=0.1)", "slowmo(3)", "sgp"])
def test_other_ranks_start_from_the_consensus(gang4: Gang, gang2: Gang, recipe: str, tmp_path: Path) -> None:
    agreed = gang4.run(saved_only, recipe, str(tmp_path / "a"))[0]
    for begun, moments, end in gang2.run(loaded_elsewhere, recipe, str(tmp_path / "a")):
        assert same(begun, agreed)
        assert moments.abs().sum() > 0
        assert end.isfinite().all()


def saved_by_own_ways(rank: int, size: int, path: str) -> Tensor:
    with attached("local_sgd(4)", OwnWay(rank), adam) as (model, optimizer, comm):
        while comm.step < 2:
            small_step(model, optimizer, comm, rank)
        checkpoint.save(comm, path)
        (state,) = [state for state in optimizer.state.values() if state["exp_avg"].dim() == 2]
        return state["exp_avg"]


@gang
def test_momenta_that_the_first_rank_lacks_are_kept_by_another_number_of_ranks(gang2: Gang, tmp_path: Path) -> None:
    kept = gang2.run(saved_by_own_ways, str(tmp_path / "a"))
    with attached("local_sgd(4)", OwnWay(0), adam) as (model, optimizer, comm):
        checkpoint.load(comm, tmp_path / "a")
        for way, moment in zip(model.ways, kept, strict=True):
            assert same(optimizer.state[way.weight]["exp_avg"], moment)
            assert optimizer.state[way.weight]["step"] == 2


def unreadable(rank: int, size: int, path: str) -> tuple[str, float, Any]:
    """Learning rates of NumPy's are plain numbers in a checkpoint; what could not be loaded again is refused on all ranks."""
    milestones = Counter({3: 1})
    with attached("topk", Awkward(), adam) as (model, optimizer, comm):
        small_step(model, optimizer, comm, rank)
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(comm, path, {"dice": np.random.default_rng(0).random(2)} if rank == 1 else {})
        optimizer.param_groups[0]["lr"] = np.float64(0.005)
        checkpoint.save(comm, path, {"milestones": milestones, "best": np.float32(0.5)})
    with attached("topk", Awkward(), adam) as (_, optimizer, comm):
        extra = checkpoint.load(comm, path)
        assert type(extra["best"]) is float
        return str(caught.value), optimizer.param_groups[0]["lr"], extra["milestones"]


@gang
def test_what_is_saved_can_be_loaded(gang2: Gang, tmp_path: Path) -> None:
    for said, rate, milestones in gang2.run(unreadable, str(tmp_path / "a")):
        assert "rank 1 cannot save" in said
        assert "torch.from_numpy(array)" in said
        assert (type(rate), rate) == (float, 0.005)
        assert [*milestones.elements()] == [3]


def saved_own(rank: int, size: int, recipe: str, path: str) -> Tensor:
    with attached(recipe, Awkward(), adam) as (model, optimizer, comm):
        while comm.step < 4:
            small_step(model, optimizer, comm, rank)
        checkpoint.save(comm, path)
        return flat(model)


@gang
@pytest.mark.parametrize(
    "recipe",
    ["bmuf(3, momentum=0.5, nesterov=True)", "eager_diloco(2)", "easgd(3)", "allreduce + post_local(1, eager(3))"],
)
def test_other_ranks_start_from_the_mean_of_those_that_trained_where_the_consensus_is_another(
    gang4: Gang, gang2: Gang, recipe: str, tmp_path: Path
) -> None:
    """From the consensus they would lose what a look-ahead, or their own progress, is ahead of it."""
    mean = torch.stack(gang4.run(saved_own, recipe, str(tmp_path / "a"))).double().mean(0)
    for begun, _, end in gang2.run(loaded_elsewhere, recipe, str(tmp_path / "a")):
        torch.testing.assert_close(begun.double(), mean, rtol=1e-6, atol=1e-7)
        assert end.isfinite().all()


def stumbling(rank: int, size: int, path: str) -> list[str]:
    """A rank alone cannot write, cannot read, or finds another's checkpoint: all are told, and go on together."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(30, "Read-only file system")

    said = list[str]()

    def tried(do: Callable[[], Any]) -> None:
        with pytest.raises(CheckpointError) as caught:
            do()
        said.append(str(caught.value))

    with attached("slowmo(3)") as (model, optimizer, comm):
        small_step(model, optimizer, comm, rank)
        write = FileSystemWriter.write_data
        if rank == 1:
            FileSystemWriter.write_data = full
        try:
            tried(lambda: checkpoint.save(comm, path + "/a"))
        finally:
            FileSystemWriter.write_data = write
        checkpoint.save(comm, path + "/a")
        tried(lambda: checkpoint.save(comm, path + "/a"))
        tried(lambda: checkpoint.load(comm, path + ("/a" if rank == 0 else "/b")))
        small_step(model, optimizer, comm, rank)
        checkpoint.load(comm, path + "/a")
        said.append(str(comm.step))
    return said


@gang
def test_what_fails_on_one_rank_fails_on_all(gang2: Gang, tmp_path: Path) -> None:
    for said in gang2.run(stumbling, str(tmp_path)):
        assert (
            said[0] == f"rank 1 cannot write to {tmp_path}/a: [Errno 30] Read-only file system; no checkpoint was saved"
        )
        assert "holds a checkpoint already; save each checkpoint to its own folder, such as step1" in said[1]
        assert "/b is not a finished distributed checkpoint: it has no .metadata" in said[2]
        assert said[3] == "1"


def hooked(rank: int, size: int, path: str) -> list[Tensor]:
    """The model after four steps, and after two with a hook and a model that were taken up in the middle."""

    def fresh() -> Any:
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(17, 7))
        hook = gossamer.ddp.register(model, "topk(ratio=0.1)", seed=SEED, deadline=DEADLINE)
        return model, torch.optim.SGD(model.parameters(), lr=0.05), hook

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(2):
            optimizer.zero_grad()
            x, y = data(rank, step)
            (model(x) - y).square().mean().backward()
            optimizer.step()

    model, optimizer, hook = fresh()
    train(model, optimizer)
    kept = {n: t.clone() for n, t in model.state_dict().items()}
    dcp.save({"hook": hook}, checkpoint_id=path)
    train(model, optimizer)
    hook.close()
    again, optimizer, hook = fresh()
    again.load_state_dict(kept)
    assert checkpoint.load(hook, path, "hook") == {}
    train(again, optimizer)
    hook.close()
    return [flat(model), flat(again)]


@gang
def test_a_hooks_memory_is_taken_up_from_a_folder(gang2: Gang, tmp_path: Path) -> None:
    for whole, rest in gang2.run(hooked, str(tmp_path / "a")):
        assert same(whole, rest)


# -- alone ---------------------------------------------------------------------------------------------------------


def fresh(recipe: str = "topk") -> tuple[nn.Module, torch.optim.Optimizer, Communicator]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    comm = gossamer.attach(model, optimizer, recipe)
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    return model, optimizer, comm


class Evil:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


class Spawning(Evil):
    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("evil", [Evil, Spawning])
def test_metadata_that_would_run_code_are_refused_and_run_nothing(tmp_path: Path, evil: type[Evil]) -> None:
    _, _, comm = fresh()
    checkpoint.save(comm, tmp_path / "a")
    metadata = tmp_path / "a" / ".metadata"
    content = pickle.loads(metadata.read_bytes())
    content.planner_data = evil(tmp_path / "ran")
    metadata.write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: it names .*none of its code was run"):
        checkpoint.load(comm, tmp_path / "a")
    assert not (tmp_path / "ran").exists()


def test_what_its_classes_would_do_is_not_done(tmp_path: Path) -> None:
    """A record that stands for a class can be called, and told what it holds, and is a record all the same."""
    _, _, comm = fresh()
    checkpoint.save(comm, tmp_path / "a")
    text = f"cpathlib\nPosixPath\n(S'{tmp_path / 'ran'}'\ntR(N}}S'storage_data'\n}}stb."
    (tmp_path / "a" / ".metadata").write_bytes(text.encode())
    with pytest.raises(CheckpointError, match="it lacks storage_data"):
        checkpoint.load(comm, tmp_path / "a")


def test_torchs_own_functions_are_not_run_either(tmp_path: Path) -> None:
    _, _, comm = fresh()
    checkpoint.save(comm, tmp_path / "a")
    torch.save(Evil(tmp_path / "ran"), tmp_path / "inner.pt")
    text = f"ctorch\nload\n(S'{tmp_path / 'inner.pt'}'\ntR."
    (tmp_path / "a" / ".metadata").write_bytes(text.encode())
    with pytest.raises(CheckpointError, match=r"it names torch.load, which no checkpoint contains"):
        checkpoint.load(comm, tmp_path / "a")
    assert not (tmp_path / "ran").exists()


def test_entries_that_would_run_code_are_refused_and_run_nothing(tmp_path: Path) -> None:
    _, _, comm = fresh()
    dcp_save({"comm": {**comm.state_dict(), "seed": Evil(tmp_path / "ran")}}, tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"'comm.seed' cannot be read: it is damaged, or not only tensors"):
        checkpoint.load(comm, tmp_path / "a")
    assert not (tmp_path / "ran").exists()


def dcp_save(state: dict[str, Any], path: Path) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path)


def test_a_file_whose_numbers_were_damaged_is_refused(tmp_path: Path) -> None:
    """Each byte of a tensor's data, turned: torch.load takes all of them."""
    values = torch.arange(1.0, 5.0)
    torch.save({"values": values}, tmp_path / "rank0.pt")
    raw = (tmp_path / "rank0.pt").read_bytes()
    begin = raw.index(values.numpy().tobytes())
    for at in range(begin, begin + 16):
        (tmp_path / "rank0.pt").write_bytes(raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :])
        assert not torch.load(tmp_path / "rank0.pt", weights_only=True)["values"].equal(values)
        with pytest.raises(CheckpointError, match=r"rank0.pt cannot be read: it is damaged or cut short \(its part"):
            checkpoint.read(tmp_path / "rank0.pt")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "there is no such file"),
        (b"", "it is damaged or cut short"),
        (b"hello", "it is damaged or cut short"),
        (pickle.dumps({"a": 1}), "it is damaged or cut short"),
    ],
)
def test_what_is_no_checkpoint_file_says_so(tmp_path: Path, content: bytes | None, why: str) -> None:
    if content is not None:
        (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"x.pt cannot be read: {why}"):
        checkpoint.read(tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="it is not a file"):
        checkpoint.read(tmp_path)
    with pytest.raises(CheckpointError, match="it is not a file"):
        checkpoint.read("/dev/zero")


def test_a_file_that_would_run_code_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    torch.save({"comm": Evil(tmp_path / "ran")}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="not only tensors and plain values"):
        checkpoint.read(tmp_path / "x.pt")
    assert not (tmp_path / "ran").exists()


def test_a_dictionary_read_from_a_file_is_taken_up(tmp_path: Path) -> None:
    _, _, comm = fresh("slowmo(3)")
    torch.save({"comm": comm.state_dict()}, tmp_path / "rank0.pt")
    _, _, again = fresh("slowmo(3)")
    again.load_state_dict(checkpoint.read(tmp_path / "rank0.pt")["comm"])
    assert again.step == 1


def test_a_damaged_folder_is_refused_or_loads_what_was_saved(tmp_path: Path) -> None:
    """One bit of each 331st byte, in data and metadata."""
    model, _, comm = fresh()
    checkpoint.save(comm, tmp_path / "a", {"note": "x"})
    for name in (".metadata", "__0_0.distcp"):
        file = tmp_path / "a" / name
        raw, refused = file.read_bytes(), 0
        for at in range(0, len(raw), 331):
            file.write_bytes(raw[:at] + bytes([raw[at] ^ 16]) + raw[at + 1 :])
            before = held(model)
            try:
                assert checkpoint.load(comm, tmp_path / "a") == {"note": "x"}
            except CheckpointError:
                refused += 1
            assert same(held(model), before)
        file.write_bytes(raw)
        assert refused > 2


def test_another_models_folder_is_refused(tmp_path: Path) -> None:
    _, _, comm = fresh()
    checkpoint.save(comm, tmp_path / "a")
    other = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
    with gossamer.attach(other, torch.optim.SGD(other.parameters(), lr=0.1), "topk") as comm:
        before = held(other)
        with pytest.raises(CheckpointError, match=r"'2.weight' was \[1, 4\], and is \[2, 4\] now"):
            checkpoint.load(comm, tmp_path / "a")
        assert same(held(other), before)


def test_a_file_that_zip_takes_and_torch_does_not_is_refused(tmp_path: Path) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as entries:
        entries.writestr("hello", "world")
    (tmp_path / "x.pt").write_bytes(file.getvalue())
    with pytest.raises(CheckpointError, match=r"x\.pt cannot be read"):
        checkpoint.read(tmp_path / "x.pt")
