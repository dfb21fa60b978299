"""`make demo` says what it does while pip works, and that it takes minutes."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is missing")
def test_a_first_demo_says_what_takes_minutes_before_it_begins(tmp_path: Path) -> None:
    command = ["make", "-n", "-C", str(ROOT), f"VENV={tmp_path}/venv", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    lines = done.stdout.splitlines()
    said = [i for i, line in enumerate(lines) if line.lstrip("@ ").startswith("echo ")]
    install = [i for i, line in enumerate(lines) if "pip install" in line]
    (demo,) = [i for i, line in enumerate(lines) if "gossamer compare" in line]
    assert said[0] < install[0]
    assert "minutes" in lines[said[0]]
    assert all(any(i <= at for i in said) for at in install)
    assert said[-1] == demo - 1
    assert "minutes" in lines[said[-1]]
