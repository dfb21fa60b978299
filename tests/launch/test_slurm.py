"""A Slurm of one node: jobs are preempted and requeued, and end. Debian's packages slurmctld, slurmd and munge, as root."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.gang import free_port

ROOT = Path(__file__).parents[2]
TRY = ROOT / "examples" / "launch" / "slurm" / "try.sh"
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")

pytestmark = [
    pytest.mark.gang,
    pytest.mark.slow,
    pytest.mark.skipif(
        os.getuid() != 0 or any(shutil.which(program) is None for program in PROGRAMS),
        reason="needs root and Debian's packages slurmctld, slurmd, slurm-client and munge",
    ),
]


def tried(what: str, folder: Path) -> str:
    env = os.environ | {
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT / "src"),
        "SLURM_PORT": str(free_port()),
        "SLURMD_PORT": str(free_port()),
        "MASTER_PORT": str(free_port()),
    }
    command = [str(TRY), what, str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_job_of_all_is_preempted_saves_and_goes_on_from_there(tmp_path: Path) -> None:
    said = tried("torchrun", tmp_path)
    (stopped, ended), (resumed,) = re.findall(r"trained to step (\d+)", said), re.findall(r"/step(\d+)$", said, re.M)
    assert stopped == resumed
    assert 50 <= int(stopped) < int(ended) == 3000
    assert said.endswith("Restarts=1\n")
    assert (tmp_path / "run" / "model.pt").exists()


def test_one_member_is_preempted_and_comes_back_and_the_others_train_on(tmp_path: Path) -> None:
    said = tried("members", tmp_path)
    assert said.count("was told to stop, and left") == said.count("Restarts=1") == 1
    assert said.count("Restarts=0") == 2
    (gone,) = set(re.findall(r"rank (\d) has left", said))
    assert set(re.findall(r"rank (\d) is back", said)) == {gone}
    assert "is lost" not in said
    assert said.count("ended at step 3000 with ranks (0, 1, 2)") == 3
    first, *rest = (torch.load(tmp_path / "run" / f"member{rank}.pt", weights_only=True)["model"] for rank in range(3))
    assert all(torch.equal(t, other[name]) for other in rest for name, t in first.items())
