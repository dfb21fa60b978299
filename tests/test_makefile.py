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


def prepared(folder: Path, version_fits: bool) -> tuple[str, list[str]]:
    """What `make` prints where the first try was left without pip, as by Debian's venv without ensurepip, and what it runs."""
    (folder / "venv" / "bin").mkdir(parents=True)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >>{folder}/calls\n[ "$1" = -c ] && exit {int(not version_fits)}\nexit 1\n')
    python.chmod(0o755)
    (folder / "venv" / "bin" / "python").symlink_to(python)
    target = f"{folder}/venv/.installed"
    command = ["make", "-C", str(ROOT), "APT=", f"PYTHON={python}", f"VENV={folder}/venv", target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode
    return done.stdout, (folder / "calls").read_text().splitlines()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is missing")
def test_an_environment_without_pip_is_made_again(tmp_path: Path) -> None:
    _, calls = prepared(tmp_path, version_fits=True)
    assert calls[-1] == f"-m venv {tmp_path}/venv"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is missing")
def test_a_python_that_is_too_old_is_told_before_anything_is_fetched(tmp_path: Path) -> None:
    said, calls = prepared(tmp_path, version_fits=False)
    assert "gossamer needs Python 3.11 or later" in said
    assert [call for call in calls if not call.startswith("-c ")] == []
