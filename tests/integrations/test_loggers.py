"""The page on loggers, with TensorBoard itself: what it says to type writes curves that TensorBoard reads."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.S | re.M)


@pytest.mark.usefixtures("capsys")
def test_tensorboard_shows_what_the_page_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    loop, *others = BLOCK.findall(PAGE.read_text())
    (board,) = (block for block in others if "SummaryWriter" in block)
    space: dict[str, Any] = {}
    with torch.random.fork_rng():
        exec(compile(loop + board, PAGE.name, "exec"), space)
    space["writer"].close()

    curves = EventAccumulator(str(tmp_path / "runs" / "slow-network")).Reload()
    names = {f"gossamer/{name}" for name in ("step_seconds", "sent_bytes_per_step", "residual_norm", "ratio_to_dense")}
    assert names <= {*curves.Tags()["scalars"]}
    assert [(event.step, event.value) for event in curves.Scalars("gossamer/step")] == [(10, 10.0), (20, 20.0)]
