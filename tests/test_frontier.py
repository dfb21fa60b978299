"""`benchmarks/frontier.py` keeps every loss that it has found, whatever happens while it writes the next."""

import json
import os
from pathlib import Path

import pytest
from benchmarks import frontier
from benchmarks.frontier import Kept, Side


def test_losses_that_are_known_survive_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(side: Side, recipe: str, rate: float, seed: int, steps: int, lies: float) -> float:
        return rate

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(frontier, "trained", trained)
    path, side = tmp_path / "runs" / "frontier.json", Side("allreduce")
    kept = Kept(path, 4)
    assert kept.loss(side, "allreduce", 0.5, 0, 1.0) == 0.5
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        kept.loss(side, "allreduce", 0.25, 0, 1.0)
    assert list(json.loads(path.read_text()).values()) == [0.5]
