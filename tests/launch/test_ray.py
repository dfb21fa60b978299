"""Ray Train goes on with fewer workers when a node is lost, where Ray is installed."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.gang
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_a_node_is_lost_and_the_rest_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "RAY_DEDUP_LOGS": "0"}
    command = [sys.executable, str(ROOT / "examples" / "launch" / "ray" / "lose_a_node.py"), str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    reports = [(int(e), int(w)) for e, w in re.findall(r"'epoch': (\d+), 'loss': [\d.]+, 'workers': (\d)", said)]
    assert {workers for _, workers in reports} == {2, 4}
    seen = [epoch for epoch, _ in reports]
    assert [epoch for epoch in range(1, 13) if epoch not in seen] == []
    assert reports[-1] == (12, 2)
