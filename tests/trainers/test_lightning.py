"""Lightning's Trainer with a strategy of gossamer: two ranks, which save what they saw."""

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from tests.trainers.ranks import (
    AVERAGE_THEMSELVES,
    BY_TORCHRUN,
    blocks,
    changed,
    on_forked_ranks,
    on_ranks,
    patched,
    python,
    seen,
)

from gossamer.trainers.releases import LIGHTNING, refuse_release

pytestmark = pytest.mark.gang
installed = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")

QUICK = ("strategy", "local", "resumed", "told", "public", "refused", "manual", "counted", "exception")
KILLED = ("allreduce", "topk", "powersgd", "slowmo(4)", "local_sgd(4)", "sgp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One start of two ranks for all quick tests; the last case ends with an exception on one rank."""
    folder = tmp_path_factory.mktemp("lightning")
    on_forked_ranks("lightning_cases.py", folder, *QUICK, **BY_TORCHRUN)
    return folder


@installed
def test_allreduce_is_equal_to_ddp_with_accumulation_clipping_and_a_sanity_check(folder: Path) -> None:
    for rank in seen(folder, "strategy"):
        assert rank["steps"] == 10
        assert torch.equal(rank["ddp"], rank["allreduce"])


@installed
def test_evaluations_see_the_consensus_also_before_the_first_step_and_in_a_round(folder: Path) -> None:
    first, second = seen(folder, "local")
    assert first["steps"] == second["steps"] == [0, 3, 3, 6, 6, 9, 9]  # rounds of local_sgd(4) end after 4 and 8
    for a, b in zip(first["judged"], second["judged"], strict=True):
        assert torch.equal(a, b)
    after_six_steps = 12  # micro-batches
    mine, other = first["own"][after_six_steps], second["own"][after_six_steps]
    assert not torch.equal(mine, other)
    torch.testing.assert_close(first["judged"][3], (mine + other) / 2)


@installed
def test_every_rank_holds_the_consensus_after_fit_and_tests_and_predicts_with_it(folder: Path) -> None:
    first, second = seen(folder, "local")
    for name in ("final", "predicted"):
        assert torch.equal(first[name], second[name])
    assert first["tested"] == second["tested"]
    assert "only while trainer.fit() runs" in first["said"]


@installed
def test_a_checkpoint_saved_in_an_evaluation_is_the_consensus_and_its_sidecars_are_each_rank_s_own(
    folder: Path,
) -> None:
    first, second = seen(folder, "local")
    saved = torch.load(first["best"], weights_only=True)
    step = saved["gossamer"]["step"]
    judged = first["judged"][first["steps"].index(step)]
    assert torch.equal(torch.cat([t.flatten() for t in saved["state_dict"].values()]), judged)
    owns = [
        torch.load(f"{first['best']}.gossamer/gossamer-rank{rank}-of-2.pt", weights_only=True)["own"] for rank in (0, 1)
    ]
    assert owns[0] is not None
    assert any(not torch.equal(owns[0][name], owns[1][name]) for name in owns[0] if name != "frame")
    names = [name for name in first["left"] if name.endswith((".ckpt", ".gossamer"))]
    assert len(names) == 4  # the best and the last; those before went with their sidecars
    assert second["best"] == first["best"]


@installed
def test_metrics_are_in_the_event_files_at_the_trainer_s_interval(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "local" / "logs")).Reload()
    for name in ("sent_bytes_per_step", "exposed_seconds_per_step", "residual_norm"):
        assert f"gossamer/{name}" in events.Tags()["scalars"]
    assert [event.step for event in events.Scalars("gossamer/sent_bytes")] == [1, 3, 5, 7, 9]  # every second step
    assert [event.value for event in events.Scalars("gossamer/step")] == [2, 4, 6, 8, 10]


@installed
@pytest.mark.parametrize("recipe", ["topk", "local_sgd(4)"])
def test_a_run_resumed_in_a_round_ends_where_an_unbroken_one_does(folder: Path, recipe: str) -> None:
    finals = [rank[recipe] for rank in seen(folder, "resumed")]
    for unbroken, again, steps in finals:
        assert steps == 10
        assert torch.equal(unbroken, again)
    assert torch.equal(finals[0][0], finals[1][0])


@installed
def test_a_notice_on_one_rank_lets_all_save_and_stop_after_the_same_step(folder: Path) -> None:
    first, second = seen(folder, "told")
    assert 2 <= first["stopped"] == second["stopped"] < 3000
    for rank in (first, second):
        assert rank["files"] == ["last.ckpt", "last.ckpt.gossamer"]
        assert torch.equal(rank["unbroken"], rank["resumed"])
        assert rank["put back"]
        assert (rank["callbacks"], rank["judged"]) == (2, 1.0)


@installed
def test_a_checkpoint_without_its_sidecars_says_what_is_missing_and_how_to_go_on(folder: Path) -> None:
    for rank in seen(folder, "public"):
        assert rank["files"] == ["gossamer-rank0-of-2.pt", "gossamer-rank1-of-2.pt"]
        assert "gossamer-rank1-of-2.pt is missing" in rank["partial"]
        assert "public_only=True" in rank["partial"]
        assert "but this run uses" in rank["another recipe"]
        assert re.search(r"saved at step 4, but the files in .* at step 6", rank["another save"])
        assert rank["on purpose"] == 10
        assert rank["removed"]
        assert "memory://saved.ckpt is not in a file system" in rank["remote"]


@installed
def test_what_cannot_train_with_a_recipe_is_refused_on_all_ranks(folder: Path) -> None:
    for rank in seen(folder, "refused"):
        assert "LBFGS computes the gradient several times" in rank["search"]
        assert "configure_optimizers returned 2 optimizers" in rank["two"]
        assert "the callback StochasticWeightAveraging averages each rank's own model" in rank["swa"]
        assert "the callback WeightAveraging averages each rank's own model" in rank["ema"]
        assert "Strategy(..., ddp_comm_hook=) asks DDP to average in another way" in rank["hook"]


@installed
@pytest.mark.parametrize("what", AVERAGE_THEMSELVES)
def test_what_averages_or_shards_by_itself_is_refused_on_all_ranks(folder: Path, what: str) -> None:
    for rank in seen(folder, "refused"):
        assert AVERAGE_THEMSELVES[what] in rank[what]


@installed
def test_manual_optimization_with_one_optimizer_is_averaged_once(folder: Path) -> None:
    for rank in seen(folder, "manual"):
        assert rank["steps"] == 10
        assert torch.equal(rank["manual"], rank["ddp"])
        assert torch.equal(rank["manual"], rank["automatic"])


@installed
def test_the_trainer_s_own_collectives_are_those_of_the_page(folder: Path) -> None:
    for rank in seen(folder, "counted"):
        base = {"broadcast": 8}
        assert rank["nothing"] == base
        assert rank["sync_dist"] == base | {"all_reduce": 8, "barrier": 8}
        assert rank["timer"] == rank["seconds"] == base | {"broadcast_object_list": 8}
        assert rank["early"] == base | {"all_reduce": 1, "barrier": 1}


@installed
def test_a_checkpoint_on_an_exception_of_one_rank_waits_for_nobody(folder: Path) -> None:
    first, second = seen(folder, "exception")
    assert "Rank 1 has detached or ended" in first["error"]
    assert second["error"] == "RuntimeError: rank 1 has had enough"
    assert any("is saved after an exception: it holds rank 0's own model" in text for text in first["said"])
    saved = torch.load(folder / "exception" / "failed.ckpt", weights_only=True)
    assert torch.equal(torch.cat([t.flatten() for t in saved["state_dict"].values()]), first["model"])
    assert "gossamer" not in saved
    assert not (folder / "exception" / "failed.ckpt.gossamer").exists()


def test_the_page_changes_one_line() -> None:
    (stock,), (diff,) = blocks("lightning.md", "python"), blocks("lightning.md", "diff")
    out, put = changed(diff)
    assert out == ['strategy="ddp",']
    assert put == ["from gossamer.trainers.lightning import Strategy", 'strategy=Strategy("topk"),']
    assert 'strategy=Strategy("topk"),' in patched(stock, diff)


@installed
@pytest.mark.slow
def test_the_script_of_the_page_trains_and_resumes(tmp_path: Path) -> None:
    (stock,), (diff,) = blocks("lightning.md", "python"), blocks("lightning.md", "diff")
    script, last = tmp_path / "train.py", tmp_path / "runs" / "last.ckpt"
    for epochs in (2, 3):
        script.write_text(patched(stock, diff).replace("max_epochs=2", f"max_epochs={epochs}"))
        python(tmp_path, script)
        saved = torch.load(last, weights_only=True)
        assert saved["global_step"] == saved["gossamer"]["step"] == 8 * epochs


def test_the_module_says_which_package_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    for name in ("lightning", "fabric"):
        monkeypatch.delitem(sys.modules, f"gossamer.trainers.{name}", raising=False)
        with pytest.raises(ImportError, match="needs the package lightning, version"):
            importlib.import_module(f"gossamer.trainers.{name}")


@pytest.mark.parametrize("version", ["2.5.6", "3.0.0"])
def test_a_release_that_was_not_tested_is_refused(version: str) -> None:
    with pytest.raises(ImportError, match=f"lightning {version} is installed"):
        refuse_release("gossamer.trainers.lightning", version, LIGHTNING)


@installed
@pytest.mark.slow
def test_a_run_that_was_killed_in_a_round_is_resumed_bit_by_bit(tmp_path: Path) -> None:
    for recipe in KILLED:
        on_ranks("lightning_killed.py", tmp_path, "killed", recipe, ends=False)
        assert (tmp_path / recipe / "step=6.ckpt").exists()
        assert not (tmp_path / recipe / "step=9.ckpt").exists()
    on_ranks("lightning_killed.py", tmp_path, "resumed", *KILLED)
    for rank in seen(tmp_path, "resumed"):
        for recipe in KILLED:
            unbroken, again, steps = rank[recipe]
            assert steps == 10
            assert torch.equal(unbroken, again), recipe
