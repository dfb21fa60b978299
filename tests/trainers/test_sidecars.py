"""Sidecars on real processes: a trainer's own checkpoint and these files go on as if nothing had been interrupted."""

from pathlib import Path

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import SMALL, OwnWay, attached, flat, same, sgd, small_step
from torch import Tensor, nn

import gossamer
from gossamer.core.errors import CheckpointError
from gossamer.integrations import Communicator, checkpoint
from gossamer.trainers import sidecars

pytestmark = pytest.mark.gang

RECIPES = ["allreduce", "topk(ratio=0.3)", "local_sgd(4)", "slowmo(4)", "sgp", "powersgd(rank=1)"]
RECIPES += ["bmuf(5, nesterov=True)"]  # at the end of a round, where the model that is judged is without the look-ahead
STEPS, SAVED = 9, 5  # in the midst of a round


def public(comm: Communicator, folder: Path) -> None:
    """What trainers save: the model that is judged, and rank 0's optimizer."""
    with comm.consensus():
        if comm.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save([comm.model.state_dict(), comm.optimizers[0].state_dict()], folder / "public.pt")
    sidecars.write(comm, folder)


def taken_up(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    state, kept = torch.load(folder / "public.pt", weights_only=True)
    model.load_state_dict(state)
    optimizer.load_state_dict(kept)


def unbroken(rank: int, size: int, recipe: str, path: str) -> list[Tensor]:
    out = list[Tensor]()
    with attached(recipe) as (model, optimizer, comm):
        while comm.step < STEPS:
            small_step(model, optimizer, comm, rank)
            if comm.step == SAVED:
                public(comm, Path(path))
            out.append(flat(model))
    return out


def resumed(rank: int, size: int, recipe: str, path: str, public_only: bool = False) -> list[Tensor]:
    out = list[Tensor]()
    with attached(recipe, seed=99) as (model, optimizer, comm):
        taken_up(model, optimizer, Path(path))
        sidecars.load(comm, path, public_only)
        while len(out) < STEPS - SAVED:
            small_step(model, optimizer, comm, rank)
            out.append(flat(model))
        comm.finish()
    return [*out, flat(model)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_trainer_goes_on_in_the_midst_of_a_round(gang2: Gang, recipe: str, tmp_path: Path) -> None:
    recipe, path = recipe + SMALL, str(tmp_path / "run")
    for rank, (then, now) in enumerate(zip(gang2.run(unbroken, recipe, path), gang2.run(resumed, recipe, path))):
        assert all(same(a, b) for a, b in zip(then[SAVED:], now)), f"rank {rank}"


def written_by_own_ways(rank: int, size: int, path: str) -> Tensor:
    with attached("local_sgd(4)", OwnWay(rank), sgd) as (model, optimizer, comm):
        while comm.step < 2:
            small_step(model, optimizer, comm, rank)
        public(comm, Path(path))
        (state,) = [state for state in optimizer.state.values() if state["momentum_buffer"].dim() == 2]
        return state["momentum_buffer"]


def test_momenta_that_the_first_rank_lacks_are_kept_by_another_number_of_ranks(gang2: Gang, tmp_path: Path) -> None:
    kept = gang2.run(written_by_own_ways, str(tmp_path))
    with attached("local_sgd(4)", OwnWay(0), sgd) as (model, optimizer, comm):
        taken_up(model, optimizer, tmp_path)
        sidecars.load(comm, tmp_path)
        for way, moment in zip(model.ways, kept, strict=True):
            assert same(optimizer.state[way.weight]["momentum_buffer"], moment)


def test_memories_begin_at_zero_only_on_purpose(gang2: Gang, tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    then = gang2.run(unbroken, "topk(ratio=0.3)", path)
    for file in (tmp_path / "run").glob("gossamer-*"):
        file.unlink()
    for rank, said in enumerate(gang2.run(refused, "topk(ratio=0.3)", path)):
        assert f"rank {rank}: {path} has no file gossamer-rank{rank}-of-2.pt" in said
        assert "pass public_only=True" in said
    now = gang2.run(resumed, "topk(ratio=0.3)", path, True)
    assert all(a.isfinite().all() and not same(a, b) for a, b in zip(now[0], then[0][SAVED:]))
    assert same(now[0][-1], now[1][-1])


def refused(rank: int, size: int, recipe: str, path: str) -> str:
    with attached(recipe) as (model, _, comm):
        before = flat(model)
        with pytest.raises(CheckpointError) as caught:
            sidecars.load(comm, path)
        assert same(before, flat(model))
        return str(caught.value)


def test_one_rank_without_its_file_stops_all(gang2: Gang, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    gang2.run(unbroken, "local_sgd(4)", str(folder))
    (folder / "gossamer-rank1-of-2.pt").unlink()
    first, second = gang2.run(refused, "local_sgd(4)", str(folder))
    assert first.startswith("rank 1 cannot go on: rank 1: ")
    assert "is incomplete: gossamer-rank1-of-2.pt is missing" in second


def test_files_of_two_saves_and_of_another_recipe_are_refused(gang2: Gang, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    gang2.run(unbroken, "local_sgd(4)", str(one))
    gang2.run(again, "local_sgd(4)", str(other))
    for said in gang2.run(refused, "topk", str(one)):
        assert "local_sgd" in said
        assert "topk" in said
    (one / "gossamer-rank1-of-2.pt").write_bytes((other / "gossamer-rank1-of-2.pt").read_bytes())
    for said in gang2.run(refused, "local_sgd(4)", str(one)):
        assert "are of different saves" in said


@pytest.mark.parametrize("recipe", ["topk(ratio=0.3)", "local_sgd(4)"])
def test_another_number_of_ranks_starts_from_the_public_model(
    gang2: Gang, gang4: Gang, recipe: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "run")
    gang4.run(unbroken, recipe, path)
    ends = [run[-1] for run in gang2.run(resumed, recipe, path)]
    assert same(*ends)
    gang2.run(again, recipe, path)
    assert sorted(file.name for file in (tmp_path / "run").glob("gossamer-*")) == [
        "gossamer-rank0-of-2.pt",
        "gossamer-rank1-of-2.pt",
    ]


def again(rank: int, size: int, recipe: str, path: str) -> None:
    with attached(recipe) as (_, _, comm):
        sidecars.write(comm, path)


def in_the_consensus(rank: int, size: int, recipe: str, path: str) -> list[str]:
    said = list[str]()
    with attached(recipe) as (model, optimizer, comm):
        while comm.step < 2:
            small_step(model, optimizer, comm, rank)
        with comm.consensus():
            agreed = flat(model)
            with comm.consensus():  # as one of a trainer inside that of the loop
                assert same(flat(model), agreed)
            for save in (checkpoint.save, sidecars.write):
                with pytest.raises(CheckpointError) as caught:
                    save(comm, Path(path) / "inside")
                said.append(str(caught.value))
        sidecars.write(comm, path)
    return said


@pytest.mark.parametrize("recipe", ["local_sgd(4)", "allreduce(fp32()) + accelerated(2)"])
def test_a_save_inside_of_the_consensus_is_refused_where_models_differ(
    gang2: Gang, recipe: str, tmp_path: Path
) -> None:
    for said in gang2.run(in_the_consensus, recipe, str(tmp_path)):
        assert all("would save the consensus as this rank's own model" in text for text in said)


def test_a_folder_that_cannot_be_written_is_said_on_all_ranks(gang2: Gang, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for said in gang2.run(unwritable, str(tmp_path / "file")):
        assert "cannot write" in said


def unwritable(rank: int, size: int, path: str) -> str:
    with attached("topk") as (_, _, comm), pytest.raises(CheckpointError) as caught:
        sidecars.write(comm, path if rank == 1 else Path(path).parent / "fine")
    return str(caught.value)


def test_one_rank_alone_writes_and_loads(tmp_path: Path) -> None:
    def loop(steps: int, load: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(17, 7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with gossamer.attach(model, optimizer, "slowmo(3)") as comm:
            if load:
                taken_up(model, optimizer, tmp_path)
                sidecars.load(comm, tmp_path)
            while comm.step < steps:
                optimizer.zero_grad()
                model(torch.full((2, 17), float(comm.step))).square().mean().backward()
                optimizer.step()
            if not load and steps == 4:
                public(comm, tmp_path)
            return flat(model)

    whole = loop(8, load=False)
    loop(4, load=False)
    assert same(whole, loop(8, load=True))


def judged_after_loading(rank: int, size: int, recipe: str, path: str) -> tuple[Tensor, Tensor]:
    with attached(recipe, seed=99) as (model, optimizer, comm):
        taken_up(model, optimizer, Path(path))
        sidecars.load(comm, path)
        begun = flat(model)
        with comm.consensus():
            return begun, flat(model)


def test_more_ranks_than_the_one_that_saved_start_from_the_model_that_is_judged(gang2: Gang, tmp_path: Path) -> None:
    recipe = "allreduce(fp32()) + accelerated(2)"
    with attached(recipe) as (model, optimizer, comm):
        while comm.step < 3:
            small_step(model, optimizer, comm, 0)
        public(comm, tmp_path)
        own = flat(model)
    for begun, judged in gang2.run(judged_after_loading, recipe, str(tmp_path)):
        assert same(begun, judged)
        assert not same(begun, own)


def own_model_saved(rank: int, size: int, recipe: str, path: str) -> Tensor:
    with attached(recipe) as (model, optimizer, comm):
        while comm.step < 4:
            small_step(model, optimizer, comm, rank)
        public(comm, Path(path))
        return flat(model)


@pytest.mark.parametrize(
    "recipe", ["bmuf(3, momentum=0.5, nesterov=True)", "bmuf(2, momentum=0.5, nesterov=True)", "eager_diloco(2)"]
)
def test_other_ranks_go_on_from_the_mean_of_those_that_trained_where_the_public_model_is_another(
    gang2: Gang, gang4: Gang, recipe: str, tmp_path: Path
) -> None:
    mean = torch.stack(gang4.run(own_model_saved, recipe, str(tmp_path))).double().mean(0)
    for begun, _ in gang2.run(judged_after_loading, recipe, str(tmp_path)):
        torch.testing.assert_close(begun.double(), mean, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("nesterov", "wanted"), [(True, True), (False, False)])
def test_accelerates_public_model_is_without_a_look_ahead(nesterov: bool, wanted: bool) -> None:
    """At the end of a round all models are equal, and under `nesterov` not what is evaluated."""
    pytest.importorskip("accelerate")
    from gossamer.trainers.accelerate import may_differ

    with attached(f"bmuf(2, momentum=0.5, nesterov={nesterov})") as (model, optimizer, comm):
        while comm.step < 2:
            small_step(model, optimizer, comm, 0)
        assert may_differ(comm) == wanted


def test_files_of_an_earlier_run_are_removed_before_a_save(tmp_path: Path) -> None:
    there = ["gossamer-rank0-of-2.pt", "gossamer-rank1-of-2.pt", "gossamer-rank2-of-3.pt", "model.pt"]
    for name in there:
        (tmp_path / name).write_text("")
    sidecars.remove_older(tmp_path, 1, 2)
    assert sorted(file.name for file in tmp_path.iterdir()) == [there[0], there[2], there[3]]
    sidecars.remove_older(tmp_path, 0, 2)
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]
    sidecars.remove_older(tmp_path / "new", 0, 2)
