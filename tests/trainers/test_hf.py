"""Hugging Face's Trainer with a recipe: two ranks, which save what they saw."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from tests.trainers.ranks import (
    AVERAGE_THEMSELVES,
    TORCHRUN,
    blocks,
    changed,
    on_forked_ranks,
    on_ranks,
    patched,
    python,
    seen,
)

from gossamer.trainers.releases import TRANSFORMERS, refuse_release

pytestmark = pytest.mark.gang
installed = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")),
    reason="transformers and accelerate are not both installed",
)
peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")

QUICK = ("fp32", "local", "best", "resumed", "told", "counted", "refused")
KILLED = ("allreduce", "topk(ratio=0.1)", "powersgd", "slowmo(4)", "local_sgd(4)", "sgp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One start of two ranks for all quick tests."""
    folder = tmp_path_factory.mktemp("hf")
    on_forked_ranks("hf_cases.py", folder, *QUICK)
    return folder


def test_a_notice_on_one_rank_lets_all_save_and_stop_after_the_same_step(folder: Path) -> None:
    first, second = seen(folder, "told")
    assert 3 <= first["stopped"] == second["stopped"] < 60
    for rank in (first, second):
        assert torch.equal(rank["unbroken"], rank["resumed"])
        assert rank["put back"]


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def check_equal_to_stock(folder: Path, case: str) -> None:
    for rank in seen(folder, case):
        assert torch.equal(rank["stock"], rank["ours"])
        assert rank["stock norms"] == rank["ours norms"]
        assert max(rank["ours norms"]) > 0.5  # the largest that is not clipped


@installed
def test_allreduce_is_equal_to_the_stock_trainer_with_accumulation_and_clipping(folder: Path) -> None:
    check_equal_to_stock(folder, "fp32")


@installed
@pytest.mark.slow
@pytest.mark.parametrize("how", ["bf16", "compiled"])
def test_allreduce_is_equal_to_the_stock_trainer_in_bf16_and_compiled(how: str, tmp_path: Path) -> None:
    on_ranks("hf_cases.py", tmp_path, how)
    check_equal_to_stock(tmp_path, how)


@installed
def test_evaluations_see_the_consensus_in_the_middle_of_a_round(folder: Path) -> None:
    first, second = seen(folder, "local")
    assert first["steps"] == second["steps"] == [*range(1, 11)]  # two micro-batches are one step
    for step in (3, 6, 9):
        mine, other = first["own"][step], second["own"][step]
        assert not torch.equal(mine, other)  # rounds end after 4 and 8
        assert torch.equal(first["judged"][step], second["judged"][step])
        torch.testing.assert_close(first["judged"][step], (mine + other) / 2)
    assert first["predicted"] == second["predicted"]


@installed
@pytest.mark.parametrize("how", ["by hand", "copied"])
def test_save_pretrained_saves_the_consensus_and_a_copy_of_the_model_saves_itself(folder: Path, how: str) -> None:
    first, second = seen(folder, "local")
    expected = (first["own"][6] + second["own"][6]) / 2 if how == "by hand" else first["own"][6]
    torch.testing.assert_close(first[how], expected, rtol=0, atol=1e-8)


@installed
def test_what_is_pushed_is_the_consensus(folder: Path) -> None:
    first, second = seen(folder, "local")
    (pushed,) = first["uploaded"]
    assert second["uploaded"] == []
    torch.testing.assert_close(pushed, (first["own"][6] + second["own"][6]) / 2, rtol=0, atol=1e-8)


LOADS = """
import sys, torch
from transformers import GPT2LMHeadModel
model = GPT2LMHeadModel.from_pretrained(sys.argv[1])
torch.save(torch.cat([p.detach().flatten() for p in model.parameters()]), sys.argv[2])
assert "gossamer" not in sys.modules
"""


@installed
def test_a_saved_model_loads_in_a_plain_script_and_is_the_consensus(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(LOADS)
    python(tmp_path, "plain.py", folder / "local" / "checkpoint-6", tmp_path / "loaded.pt")
    first, second = seen(folder, "local")
    loaded = torch.load(tmp_path / "loaded.pt", weights_only=True)
    torch.testing.assert_close(loaded, (first["own"][6] + second["own"][6]) / 2, rtol=0, atol=1e-8)


@installed
def test_every_rank_holds_the_consensus_when_training_has_ended(folder: Path) -> None:
    first, second = seen(folder, "local")
    assert torch.equal(first["final"], second["final"])
    torch.testing.assert_close(first["final"], (first["own"][10] + second["own"][10]) / 2)
    assert first["eval"] == second["eval"]
    assert not first["after"]  # nothing of ours is left in the model


@installed
def test_metrics_are_in_the_trainer_s_state_and_in_event_files_at_its_interval(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    state = json.loads((folder / "local" / "checkpoint-9" / "trainer_state.json").read_text())
    logged = [entry for entry in state["log_history"] if "loss" in entry]
    assert [entry["step"] for entry in logged] == [2, 4, 6, 8]
    names = {f"gossamer/{n}" for n in ("sent_bytes_per_step", "exposed_seconds_per_step", "residual_norm")}
    assert all(names <= entry.keys() for entry in logged)
    assert logged[0]["gossamer/sent_bytes_per_step"] == 0 < logged[1]["gossamer/sent_bytes_per_step"]
    evaluated = [entry for entry in state["log_history"] if "eval_loss" in entry]
    assert not any(name.startswith("gossamer") for entry in evaluated for name in entry)
    (events,) = {path.parent for path in (folder / "local").rglob("events.out.tfevents*")}
    board = EventAccumulator(str(events)).Reload()
    assert {f"train/{name}" for name in names} <= {*board.Tags()["scalars"]}
    assert [e.step for e in board.Scalars("train/gossamer/sent_bytes_per_step")] == [2, 4, 6, 8, 10]


@installed
def test_the_best_model_is_loaded_on_all_ranks_and_its_checkpoint_keeps_its_sidecars(folder: Path) -> None:
    first, second = seen(folder, "best")
    assert first["chosen"] != "checkpoint-10"
    assert torch.equal(first["final"], first["saved"])
    assert torch.equal(second["final"], first["saved"])
    assert first["left"] == ["gossamer-rank0-of-2.pt", "gossamer-rank1-of-2.pt"]


@installed
def test_a_new_trainer_resumes_inside_a_round_as_if_nothing_had_happened(folder: Path) -> None:
    for rank in seen(folder, "resumed"):
        assert torch.equal(rank["unbroken"], rank["resumed"])


@installed
def test_sidecars_that_are_missing_or_of_another_recipe_are_refused_on_all_ranks(folder: Path) -> None:
    for rank in seen(folder, "resumed"):
        assert rank["other"].startswith("CheckpointError")
        assert "local_sgd" in rank["other"]
        assert "topk" in rank["other"]
        assert rank["missing"].startswith("CheckpointError")
        assert "gossamer-rank1-of-2.pt is missing" in rank["missing"]
        assert "pass public_only=True" in rank["missing"]


@installed
def test_training_goes_on_from_the_public_model_on_purpose(folder: Path) -> None:
    first, second = seen(folder, "resumed")
    assert torch.equal(first["on purpose"], second["on purpose"])
    assert not torch.equal(first["on purpose"], first["unbroken"])


@installed
def test_the_trainer_s_own_traffic_in_each_step_is_counted_and_warned_about(folder: Path) -> None:
    """One gather a step by default, none with the setting off; gossamer sends in the steps that end rounds only.

    Each log gathers twice more, and the number of tokens seen is gathered in each of the two micro-batches.
    """
    first, _ = seen(folder, "counted")
    assert first["default"][1:] == [{"all_gather by _get_num_items_in_batch": 1}] * 8
    assert first["off"][1:] == [{}] * 8
    assert first["logged"][1:] == [{"all_gather by _maybe_log_save_evaluate": 1, "all_gather by store_flos": 1}] * 8
    assert first["seen"][1:] == [{"all_gather by _track_num_input_tokens": 2}] * 8
    for name in ("default", "off"):
        sent = first[f"{name} sent"]
        assert len({*sent[:7]}) == 1
        assert sent[7] > sent[6]
    (said,) = first["default said"]
    assert "average_tokens_across_devices=True), the default, gathers the number of tokens" in said
    assert first["off said"] == []


REFUSED = {
    "not a trainer": "AttachError: use() takes a Trainer of transformers, or of a class made from it, got a GPT2LMHeadModel",
    "option": "AttachError: use() has no option 'ration'; it takes public_only, and of attach: nodes, seed",
    "own option": "AttachError: use(..., scaler=) is set by the Trainer: leave it out",
    "recipe": "topq",
    "is_deepspeed_enabled": "AttachError: the Trainer trains with DeepSpeed, which averages and steps by itself",
    "is_fsdp_enabled": "AttachError: the Trainer shards the model with FSDP",
    "is_in_train": "AttachError: use() was called while train() runs, or after it failed",
    "auto_find_batch_size": "lets one rank begin again alone when its memory is full",
    "twice": "AttachError: use() was called on this trainer already",
    "n_gpu": "AttachError: one process trains on 2 GPUs with DataParallel, which averages by itself",
    "LBFGS": "LBFGS",
    "lags": "The Trainer's DDP looks for unused parameters unless TrainingArguments(ddp_find_unused_parameters=False)",
    **AVERAGE_THEMSELVES,
    "LocalSGD": "AttachError: step 1 begins under no_sync() of the DDP model, as inside Accelerate's LocalSGD",
}


@installed
@pytest.mark.parametrize("what", REFUSED)
def test_what_would_train_in_another_way_is_refused_on_all_ranks(folder: Path, what: str) -> None:
    for rank in seen(folder, "refused"):
        assert REFUSED[what] in rank[what]


@installed
def test_a_new_trainer_trains_after_refusals(folder: Path) -> None:
    first, second = seen(folder, "refused")
    assert torch.equal(first["still trains"], second["still trains"])
    assert first["still trains"].isfinite().all()


@peft
@installed
def test_a_frozen_base_is_sent_only_where_it_differs_and_adapters_travel(adapted: Path) -> None:
    for rank in seen(adapted, "lora"):
        assert rank["start"] < 0.2 * rank["base bytes"]
        assert 0 <= rank["start, one differs"] - rank["start"] - rank["differing bytes"] < 1000
        assert rank["per step"] < 0.1 * rank["adapter bytes"]  # topk(ratio=0.01)
    first, second = seen(adapted, "lora")
    assert torch.equal(first["base"], second["base"])
    assert torch.equal(first["base"], first["base before"])
    assert torch.equal(first["adapter"], second["adapter"])
    assert not torch.equal(first["adapter"], first["adapter before"])


@peft
@installed
def test_sidecars_leave_the_frozen_base_out(adapted: Path) -> None:
    first, _ = seen(adapted, "lora")
    assert first["sidecar bytes"] < 0.5 * first["base bytes"]


@trl
@peft
@installed
@pytest.mark.parametrize("recipe", ["topk(ratio=0.1)", "local_sgd(4)"])
def test_sft_with_a_lora_trains_and_resumes_inside_a_round(adapted: Path, recipe: str) -> None:
    first, second = seen(adapted, "sft")
    for rank in (first, second):
        unbroken, resumed = rank[recipe]
        assert torch.equal(unbroken, resumed)
        assert rank[f"{recipe} steps"] == 11
        assert rank[f"{recipe} logged"] > 0
    assert torch.equal(first[recipe][0], second[recipe][0])
    assert not torch.equal(first[recipe][0], first["before"])


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One start of two ranks for adapters and TRL."""
    folder = tmp_path_factory.mktemp("adapted")
    on_forked_ranks("hf_adapters.py", folder, "lora", *(["sft"] if importlib.util.find_spec("trl") else []))
    return folder


@installed
@pytest.mark.slow
@pytest.mark.parametrize("recipe", KILLED)
def test_a_killed_run_resumes_as_if_it_had_not_been(recipe: str, tmp_path: Path) -> None:
    """Killed after step 7; the checkpoint of step 6 is in the middle of a round of 4."""
    on_ranks("hf_killed.py", tmp_path, "killed", recipe, ends=False)
    assert not (tmp_path / "unbroken-rank0.pt").exists()
    on_ranks("hf_killed.py", tmp_path, "resumed", recipe)
    for rank in seen(tmp_path, "resumed"):
        assert rank["from"] == 6
        assert torch.equal(rank["unbroken"], rank["resumed"])


def test_a_release_that_was_not_tested_is_refused() -> None:
    for version in ("4.57.1", "5.23.0", "6.0.0"):
        with pytest.raises(ImportError, match=rf"transformers {version} is installed, but gossamer.trainers.hf needs"):
            refuse_release("gossamer.trainers.hf", version, TRANSFORMERS)
    refuse_release("gossamer.trainers.hf", "5.30.0.dev0", TRANSFORMERS)


def test_the_page_changes_one_line() -> None:
    (stock,), (diff,) = blocks("hf.md", "python"), blocks("hf.md", "diff")
    out, put = changed(diff)
    assert out == []
    assert put == ["import gossamer.trainers.hf", 'gossamer.trainers.hf.use(trainer, "topk")']
    assert 'hf.use(trainer, "topk")' in patched(stock, diff)


@installed
@pytest.mark.slow
def test_the_script_of_the_page_trains_and_resumes(tmp_path: Path) -> None:
    (stock,), (diff,) = blocks("hf.md", "python"), blocks("hf.md", "diff")
    for steps in (12, 18):
        (tmp_path / "train.py").write_text(patched(stock, diff).replace("max_steps=12", f"max_steps={steps}"))
        python(tmp_path, *TORCHRUN, "train.py")
        state = json.loads((tmp_path / "runs" / f"checkpoint-{steps}" / "trainer_state.json").read_text())
        assert state["global_step"] == steps
        assert all(e["gossamer/sent_bytes_per_step"] > 0 for e in state["log_history"] if "loss" in e)
    assert (tmp_path / "final" / "model.safetensors").exists()
    assert sorted(p.name for p in (tmp_path / "runs" / "checkpoint-18").glob("gossamer*")) == [
        "gossamer-rank0-of-2.pt",
        "gossamer-rank1-of-2.pt",
    ]
