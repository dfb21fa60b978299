"""Ray Train v2: the script of the page, on two workers on processors, where Ray is installed."""

import importlib.util
from pathlib import Path

import pytest
import torch
from tests.trainers.ranks import blocks, python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]

DIES = """        epoch += 1
        if epoch == 2 and comm.rank == 1 and not os.path.exists(config["marker"]):
            Path(config["marker"]).write_text("dies once")
            os.kill(os.getpid(), 9)
"""


def ended(folder: Path, script: str) -> dict[str, torch.Tensor]:
    """What the checkpoint after the last epoch holds of the model."""
    folder.mkdir()
    (folder / "train.py").write_text(script)
    out = python(folder, "train.py")
    assert "epoch 3 sent" in out
    assert "'gossamer-rank0-of-2.pt', 'gossamer-rank1-of-2.pt', 'public.pt'" in out
    found = [torch.load(file, weights_only=True) for file in folder.glob("runs/ray/**/public.pt")]
    (last,) = (saved["model"] for saved in found if saved["epoch"] == 3)
    return last


def test_a_worker_dies_and_the_run_goes_on(tmp_path: Path) -> None:
    (script,) = blocks("ray.md", "python")
    marker = tmp_path / "marker"
    killed = script.replace("        epoch += 1\n", DIES).replace(
        '"epochs": 3}', f'"epochs": 3, "marker": {str(marker)!r}}}'
    )
    whole, resumed = ended(tmp_path / "whole", script), ended(tmp_path / "killed", killed)
    assert marker.exists()
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
