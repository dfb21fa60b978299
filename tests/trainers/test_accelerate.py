"""Accelerate on two real processes: with one line more, the loop trains by a recipe, saves, resumes and logs."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from tests.gang import free_port
from tests.trainers.ranks import (
    AVERAGE_THEMSELVES,
    SCRIPTS,
    blocks,
    changed,
    on_forked_ranks,
    on_ranks,
    patched,
    python,
    seen,
)
from torch import Tensor

pytestmark = [
    pytest.mark.gang,
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"),
]

RECIPES = ["allreduce", "topk(ratio=0.2)", "powersgd(rank=1)", "slowmo(4)", "local_sgd(4)", "sgp"]
LOCAL, TOPK = "resumed_local", "resumed_topk"
QUICK = ("same_as_ddp", "stopped", LOCAL, TOPK, "logged", "collectives", "refused", "told_later", "dispatched")
Seen = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("accelerate")


@pytest.fixture(scope="module")
def told(folder: Path) -> Seen:
    """What both ranks saw in all cases: the processes are started once."""
    on_forked_ranks("accelerate_cases.py", folder, *QUICK)
    return {case: seen(folder, case) for case in QUICK}


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_allreduce_is_bit_equal_to_stock_ddp(told: Seen) -> None:
    """With accumulation, clipping and AdamW, also in bfloat16, and where Accelerate's DDP was left out."""
    for rank in told["same_as_ddp"]:
        for kind in ("fp32", "bf16"):
            assert same(rank[f"stock {kind}"], rank[f"attached {kind}"]), kind
            assert rank[f"steps {kind}"] == len(rank[f"stock {kind}"]) == 9
        assert same(rank["stock fp32"], rank["attached without ddp"])
        assert not rank["left on the model"]
        assert not same(rank["stock fp32"], rank["stock bf16"])


def test_a_notice_on_one_rank_lets_all_save_after_the_same_step(told: Seen) -> None:
    first, second = told["stopped"]
    assert 2 <= first["step"] == second["step"]
    assert all(same(rank["unbroken"], rank["again"]) for rank in (first, second))


@pytest.mark.parametrize("case", [LOCAL, TOPK])
def test_load_state_goes_on_inside_a_round(told: Seen, case: str) -> None:
    for rank in told[case]:
        assert rank["step"] == 6
        assert same(rank["unbroken"], rank["resumed"])


def test_saved_models_are_the_consensus_and_load_without_gossamer(told: Seen, folder: Path) -> None:
    from safetensors.torch import load_file

    first, second = told[LOCAL]
    assert not torch.equal(first["own"], second["own"])
    consensus = first["consensus"]
    places = [folder / f"{what} local_sgd(4)" / "model.safetensors" for what in ("state", "model")]
    for held in (*(load_file(place) for place in places), first["state dict"], second["state dict"]):
        held = {name.removeprefix("module."): value for name, value in held.items()}
        assert held.keys() == consensus.keys()
        assert all(torch.equal(held[name], value) for name, value in consensus.items())
    model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
    model.load_state_dict(load_file(places[1]))


def test_metrics_are_in_event_files_at_the_interval_of_the_loop(told: Seen) -> None:
    tags = told["logged"][0]
    assert [step for step, _ in tags["loss"]] == [3, 6, 9]
    for name in ("sent_bytes_per_step", "exposed_seconds_per_step", "residual_norm"):
        assert [step for step, _ in tags[f"gossamer/{name}"]] == [3, 6, 9]
    assert all(value > 0 for _, value in tags["gossamer/sent_bytes_per_step"])
    assert all(value > 0 for _, value in tags["gossamer/residual_norm"])


def test_between_rounds_nothing_is_sent(told: Seen) -> None:
    """And Accelerate's loop sends nothing by itself; what is asked for by the loop is counted."""
    for rank in told["collectives"]:
        assert rank["steps"] == [{}] * 9
        before = rank["sent"][0]
        assert rank["sent"] == [before] * 7 + [rank["sent"][7]] * 2
        assert rank["sent"][7] > before
        assert sum(rank["asked for"].values()) == 1


SAID = {
    "register": "AttachError: register_for_checkpointing(comm) would save the state of rank 0 only",
    "second attach": "AttachError: a model of this accelerator is attached already",
    "join": "AttachError: join_uneven_inputs() lets ranks take different numbers of steps",
    "LocalSGD": "leave LocalSGD out, and use the recipe 'local_sgd(8)'",
    "partial": "gossamer-rank1-of-2.pt is missing",
    "other recipe": "CheckpointError: the checkpoint was made with",
    "raw optimizer": "AttachError: the optimizer is a AdamW that accelerator.prepare() has not returned",
    "raw model": "AttachError: the model is a Sequential that accelerator.prepare() has not returned",
    "no_sync": "AttachError: the model is under no_sync(), as inside of Accelerate's LocalSGD",
    "DEEPSPEED": "AttachError: the accelerator runs DEEPSPEED, which averages and steps by itself",
    "one process": "AttachError: 2 processes were started, but the accelerator takes each for the only one",
    "LBFGS": "AttachError: LBFGS computes the gradient several times",
    **AVERAGE_THEMSELVES,
    "FSDP": "AttachError: the accelerator shards with FSDP1, which a recipe does not support",
}


@pytest.mark.parametrize("what", SAID)
def test_wrong_use_is_refused_on_all_ranks(told: Seen, what: str) -> None:
    for rank in told["refused"]:
        assert SAID[what] in rank[what]


def test_a_refused_load_changes_nothing_and_a_load_on_purpose_takes_the_public_model(told: Seen) -> None:
    for rank in told["refused"]:
        assert rank["untouched"]
        assert rank["other untouched"]
        assert rank["on purpose"]
        assert "public_only=True" in rank["partial"]


def test_detach_gives_the_accelerator_its_methods_back(told: Seen) -> None:
    assert all(rank["given back"] for rank in told["refused"])


def test_a_communicator_that_accelerate_saved_of_rank_0_only_is_told_of(told: Seen) -> None:
    for rank in told["told_later"]:
        assert "register_for_checkpointing()" in rank["said"]


def test_dispatched_batches_are_warned_of_under_local_steps(told: Seen) -> None:
    for rank in told["dispatched"]:
        (said,) = rank["local_sgd(4)"]
        assert "rank 0 sends every batch" in said
        assert rank["topk(ratio=0.2)"] == []


def test_one_line_changes() -> None:
    """And an import."""
    (stock,), (diff,) = blocks("accelerate.md", "python"), blocks("accelerate.md", "diff")
    out, put_in = changed(diff)
    assert out == []
    assert put_in == [
        "from gossamer.trainers.accelerate import attach",
        'comm = attach(accelerator, model, optimizer, "topk")',
    ]
    compile(patched(stock, diff), "train.py", "exec")


@pytest.mark.slow
def test_the_script_of_the_page_runs_as_its_users_start_it_and_resumes(tmp_path: Path) -> None:
    (stock,), (diff,) = blocks("accelerate.md", "python"), blocks("accelerate.md", "diff")
    (tmp_path / "train.py").write_text(patched(stock, diff))
    words = (
        "--multi_gpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--main_process_port",
        str(free_port()),
        "train.py",
    )
    launch = ("-m", "accelerate.commands.launch", *words)
    assert python(tmp_path, *launch).count("epoch 0") == 1
    assert [*tmp_path.glob("runs/**/events.out.tfevents*")]
    assert (tmp_path / "runs" / "last" / "gossamer-rank1-of-2.pt").exists()
    again = python(tmp_path, *launch, "4")
    assert "epoch 0" not in again
    assert "epoch 3" in again


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 6])
def test_killed_runs_of_all_kinds_are_resumed(tmp_path: Path, step: int) -> None:
    check_killed(tmp_path, RECIPES, step)


def check_killed(folder: Path, recipes: list[str], step: int) -> None:
    script = "accelerate_killed.py"
    on_ranks(script, folder, "unbroken", str(step), *recipes)
    for recipe in recipes:
        on_ranks(script, folder, "killed", str(step), recipe, ends=False)
        assert not [*folder.glob(f"killed {recipe}*")]
    on_ranks(script, folder, "resumed", str(step), *recipes)
    for recipe in recipes:
        for whole, rest in zip(seen(folder, f"unbroken {recipe}"), seen(folder, f"resumed {recipe}"), strict=True):
            assert same(whole["weights"][step:], rest["weights"]), recipe


FOUR = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
sharded = pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP2 trains on processors since torch 2.13")


@sharded
@pytest.mark.slow
def test_a_model_that_fsdp2_shards_trains_as_a_dense_one(tmp_path: Path) -> None:
    python(tmp_path, *FOUR, SCRIPTS / "accelerate_cases.py", tmp_path, "sharded")
    for rank in seen(tmp_path, "sharded"):
        for dense, shards in zip(rank["dense"], rank["sharded"], strict=True):
            torch.testing.assert_close(shards, dense, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cases of a sharded model: four processes are started once."""
    folder = tmp_path_factory.mktemp("accelerate_sharded")
    on_forked_ranks("accelerate_sharded.py", folder, *SHARDED, "refused", ranks=4)
    return folder


SHARDED = {"topk": "topk(ratio=0.2) False", "local": "local_sgd(4) False", "own_topk": "topk(ratio=0.2) True", "own_local": "local_sgd(4) True"}  # fmt: skip


@sharded
@pytest.mark.parametrize("case", SHARDED)
def test_a_sharded_run_goes_on_inside_a_round_by_accelerates_own_calls(shards: Path, case: str) -> None:
    """Sharded by the script, and as if Accelerate had been told to shard."""
    for rank in seen(shards, case, ranks=4):
        assert rank["step"] == 5
        assert rank["rate"] == rank["rate then"] != [0.02]
        assert same(rank["unbroken"], rank["resumed"])
        assert "gossamer" in rank["files"]
        assert not [
            name for name in rank["files"] if name.startswith(("model", "pytorch_model", "optimizer", "gossamer-"))
        ]


@sharded
@pytest.mark.filterwarnings("ignore:torch.distributed is")  # torch's own, of a process alone that loads
@pytest.mark.parametrize("case", SHARDED)
def test_the_saved_model_of_a_sharded_run_is_whole_and_the_consensus(shards: Path, case: str) -> None:
    from safetensors.torch import load_file

    told = seen(shards, case, ranks=4)
    consensus = told[0]["consensus"]
    model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
    read = model.state_dict()
    torch.distributed.checkpoint.load({"model": read}, checkpoint_id=shards / SHARDED[case] / "gossamer")
    for held in (load_file(shards / f"model {SHARDED[case]}" / "model.safetensors"), told[0]["state dict"], read):
        assert held.keys() == consensus.keys()
        assert all(torch.equal(held[name], value) for name, value in consensus.items())
    assert all(rank["state dict"] == {} for rank in told[1:])


@sharded
def test_shards_that_are_missing_or_of_another_recipe_are_refused_before_anything_changes(shards: Path) -> None:
    for rank in seen(shards, "refused", ranks=4):
        assert "CheckpointError: the checkpoint was made with" in rank["other recipe"]
        assert rank["untouched"]
        assert "has no .metadata, which is written last" in rank["cut off"]
        assert "call load_state() before attach" in rank["bare"]


@sharded
def test_a_sharded_run_goes_on_with_another_recipe_on_purpose(shards: Path) -> None:
    for rank in seen(shards, "refused", ranks=4):
        assert rank["on purpose"]
        assert rank["its step"] == 0
        assert rank["its optimizer"] == {3}
        assert "but 2 steps were taken already" in rank["too late"]
