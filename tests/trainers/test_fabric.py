"""Fabric with a strategy of gossamer: two ranks, which save what they saw."""

import importlib.util
import signal
import time
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
    started,
)

pytestmark = [
    pytest.mark.gang,
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed"),
]

QUICK = ("strategy", "resumed", "public", "several", "logged", "told", "counted", "wrapped")
KILLED = ("allreduce", "topk", "powersgd", "slowmo(4)", "local_sgd(4)", "sgp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One start of two ranks for all quick tests."""
    folder = tmp_path_factory.mktemp("fabric")
    on_forked_ranks("fabric_cases.py", folder, *QUICK, **BY_TORCHRUN)
    return folder


def test_allreduce_is_equal_to_ddp_with_accumulation_and_clipping(folder: Path) -> None:
    for rank in seen(folder, "strategy"):
        assert rank["steps"] == 10
        assert torch.equal(rank["ddp"], rank["allreduce"])


@pytest.mark.parametrize("recipe", ["topk", "local_sgd(4)"])
def test_a_run_saved_in_an_evaluation_in_a_round_is_resumed_bit_by_bit(folder: Path, recipe: str) -> None:
    first, second = (rank[recipe] for rank in seen(folder, "resumed"))
    for rank in (first, second):
        assert rank["step"] == 10
        assert torch.equal(rank["unbroken"], rank["again"])
        assert torch.equal(rank["own"], rank["back"])
        assert torch.equal(torch.cat([t.flatten() for t in rank["saved"].values()]), rank["judged"])
        assert rank["rest"] == {}
    assert torch.equal(first["again"], second["again"])
    assert torch.equal(first["judged"], second["judged"])
    assert torch.equal(first["own"], second["own"]) == (recipe == "topk")


def test_a_checkpoint_without_its_sidecars_says_what_is_missing_and_how_to_go_on(folder: Path) -> None:
    for rank in seen(folder, "public"):
        assert rank["whole"] == ["gossamer-rank0-of-2.pt", "gossamer-rank1-of-2.pt"]
        assert not rank["weights only"]
        assert "gossamer-rank1-of-2.pt is missing" in rank["partial"]
        assert "public_only=True" in rank["partial"]
        assert rank["on purpose"] == 3
        assert not rank["after the end"]


def test_several_optimizers_are_served_and_what_cannot_train_is_refused(folder: Path) -> None:
    first, second = seen(folder, "several")
    assert torch.equal(first["final"], second["final"])
    for rank in (first, second):
        assert rank["steps"] == 3
        assert "call fabric.setup(model, optimizer) first" in rank["early"]
        assert "was called a second time" in rank["second"]
        assert "fabric.setup_optimizers() gives the strategy an optimizer without its model" in rank["apart"]
        assert "LBFGS computes the gradient several times" in rank["search"]
        assert "Strategy(..., ddp_comm_hook=) asks DDP to average in another way" in rank["hook"]


def test_a_notice_on_one_rank_lets_all_save_after_the_same_step(folder: Path) -> None:
    first, second = seen(folder, "told")
    assert 2 <= first["stopped"] == second["stopped"]
    for rank in (first, second):
        assert torch.equal(rank["unbroken"], rank["again"])
        assert rank["put back"]


def test_fabric_sends_nothing_between_rounds(folder: Path) -> None:
    for rank in seen(folder, "counted"):
        assert rank["steps"] == [{}] * 9
        before = rank["sent"][0]
        assert rank["sent"] == [before] * 7 + [rank["sent"][7]] * 2
        assert rank["sent"][7] > before
        assert sum(rank["asked for"].values()) == 1


@pytest.mark.parametrize("what", AVERAGE_THEMSELVES)
def test_what_averages_or_shards_by_itself_is_refused_on_all_ranks(folder: Path, what: str) -> None:
    for rank in seen(folder, "wrapped"):
        assert AVERAGE_THEMSELVES[what] in rank[what]


def test_metrics_are_in_the_event_files_of_the_loop(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "logged")).Reload()
    for name in ("sent_bytes_per_step", "exposed_seconds_per_step", "residual_norm"):
        assert [event.step for event in events.Scalars(f"gossamer/{name}")] == [2, 4, 6]


def test_the_page_changes_one_line_and_three_more_for_local_steps() -> None:
    (stock,), (one, three, _) = blocks("fabric.md", "python"), blocks("fabric.md", "diff")
    out, put = changed(one)
    assert out == ['strategy="ddp",']
    assert put == ["from gossamer.trainers.fabric import Strategy", 'strategy=Strategy("topk"),']
    assert [len(lines) for lines in changed(three)] == [1, 3]
    assert "fabric.strategy.comm.finish()" in patched(patched(stock, one), three)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["topk", "local_sgd(4)"])
def test_the_script_of_the_page_trains_and_resumes(tmp_path: Path, recipe: str) -> None:
    (stock,), (one, three, _) = blocks("fabric.md", "python"), blocks("fabric.md", "diff")
    text = patched(stock, one) if recipe == "topk" else patched(patched(stock, one), three)
    script = tmp_path / "train.py"
    for epochs in (2, 3):
        script.write_text(
            text.replace('"topk"', f'"{recipe}"').replace('state["epoch"] < 2', f'state["epoch"] < {epochs}')
        )
        python(tmp_path, script)
        saved = torch.load(tmp_path / "runs" / "last.ckpt", weights_only=True)
        assert (saved["epoch"], saved["gossamer"]["step"]) == (epochs, 8 * epochs)


@pytest.mark.slow
def test_the_script_of_the_page_saves_and_ends_when_it_is_told(tmp_path: Path) -> None:
    (stock,), (one, _, notice) = blocks("fabric.md", "python"), blocks("fabric.md", "diff")
    text = patched(patched(stock, one), notice)
    script, last = tmp_path / "train.py", tmp_path / "runs" / "last.ckpt"
    script.write_text(text.replace('state["epoch"] < 2', "True"))  # it ends only if it is told
    with started(tmp_path, script) as running:
        while not last.exists():
            assert running.poll() is None
            time.sleep(0.1)
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=300) == 0
    saved = torch.load(last, weights_only=True)
    epoch, step = saved["epoch"], saved["gossamer"]["step"]
    assert 8 * epoch < step <= 8 * (epoch + 1)
    script.write_text(text.replace('state["epoch"] < 2', f'state["epoch"] < {epoch + 1}'))
    python(tmp_path, script)
    assert torch.load(last, weights_only=True)["gossamer"]["step"] == step + 8


@pytest.mark.slow
def test_a_run_that_was_killed_in_a_round_is_resumed_bit_by_bit(tmp_path: Path) -> None:
    for recipe in KILLED:
        on_ranks("fabric_killed.py", tmp_path, "killed", recipe, ends=False)
        assert (tmp_path / f"{recipe}.ckpt").exists()
    on_ranks("fabric_killed.py", tmp_path, "resumed", *KILLED)
    for rank in seen(tmp_path, "resumed"):
        for recipe in KILLED:
            unbroken, again, begun = rank[recipe]
            assert begun == 6
            assert torch.equal(unbroken, again), recipe
