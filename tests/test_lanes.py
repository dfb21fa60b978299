"""`make test` runs every test that is not slow, once."""

import re
import subprocess
from pathlib import Path

from tests.conftest import KINDS

ROOT = Path(__file__).parents[1]


def test_every_kind_of_test_has_its_lane() -> None:
    """That a test is of one kind, and that the lane of this kind reads its file, is seen as tests are collected."""
    lanes = re.findall(r"\S+", re.findall(r"^LANES := (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)[0])
    told = subprocess.run(
        ["make", "-n", *(f"lane-{lane}" for lane in lanes)], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert sorted(re.findall(r'pytest -m "(.*?)"', told)) == sorted(f"{kind} and not slow" for kind in KINDS)
    everything = subprocess.run(["make", "-n", "test-all"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "pytest -m slow" in everything
    assert set(lanes) <= set(re.findall(r"lane-(\w+)", everything))
