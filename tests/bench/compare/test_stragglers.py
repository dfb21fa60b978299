"""Ranks that are slow on purpose: who, for how long, how often; and what is no such thing."""

import sys

import pytest

from gossamer.bench.cli.app import run
from gossamer.bench.compare.stragglers import Straggler
from gossamer.core.errors import RecipeError


def test_always_or_in_some_steps_by_a_seed() -> None:
    always, spikes = Straggler.of("2:150"), Straggler.of("all:80:0.25")
    assert [always.at(rank, 1) for rank in range(4)] == [0.0, 0.0, 0.15, 0.0]
    times = [spikes.at(rank, step) for rank in range(4) for step in range(500)]
    assert set(times) == {0.0, 0.08}
    assert 0.2 < times.count(0.08) / len(times) < 0.3  # 2000 throws: 5 standard errors, p < 1e-6; and the seed is fixed
    assert times == [spikes.at(rank, step) for rank in range(4) for step in range(500)]


@pytest.mark.parametrize("text", ["", "3", "3:", "3:ms", "-1:5", "1:5:2", "1:5:0.5:1", "x:5"])
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="--slow takes RANK:MS"):
        Straggler.of(text)


@pytest.mark.parametrize("command", [("compare", "ddp", "backup"), ("bench", "steps", "backup")])
def test_commands_refuse_a_rank_that_is_not_there(
    command: tuple[str, ...], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["gossamer", *command, "--hosts", "3", "--slow", "3:200"])
    assert run() == 2
    assert "there is no rank 3 among 3" in capfd.readouterr().err
