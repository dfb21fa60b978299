"""What starts torchrun hands a notice to its ranks."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.marked import Marked, wait_for

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.gang
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_shell_lets_all_ranks_save_and_end_well(tmp_path: Path, number: int) -> None:
    marked = Marked()
    env = os.environ | marked.label | {"PYTHON": sys.executable, "PYTHONPATH": str(EXAMPLES.parent / "src")}
    env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    words = ["--standalone", "--nproc-per-node", "2", "examples/resumable.py", str(tmp_path), "--steps", "1000000"]
    command = ["examples/launch/torchrun.sh", *words, "--every", "20"]
    started = subprocess.Popen(command, cwd=EXAMPLES.parent, env=env, text=True, stdout=subprocess.PIPE)
    try:
        wait_for(lambda: (tmp_path / "step20" / ".metadata").exists() or started.poll() is not None)
        started.send_signal(number)
        said, _ = started.communicate(timeout=300)
    finally:
        marked.end()
    assert started.returncode == 0
    stopped = said.splitlines()[-1].removeprefix("trained to step ").partition(" ")[0]
    assert 20 <= int(stopped) < 1_000_000
    assert (tmp_path / f"step{stopped}" / ".metadata").exists()
