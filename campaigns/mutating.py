"""Mistakes, made one at a time in a copy of the source: whether the test that should see each does."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"


class Mutation(NamedTuple):
    """What would be wrong, where, and the test that must fail; `right` occurs once in the file."""

    finding: str
    file: str
    right: str
    wrong: str
    test: str

    def made_in(self, source: Path) -> bool:
        """Make the mistake in a copy of the source; False where the source reads otherwise now."""
        file = source / "gossamer" / self.file
        text = file.read_text()
        if text.count(self.right) != 1:
            return False
        file.write_text(text.replace(self.right, self.wrong))
        return True


def run(test: str, source: Path) -> subprocess.CompletedProcess[str]:
    """A test, on some copy of the source."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@cache
def passes(test: str) -> bool:
    """Whether it does while nothing is wrong."""
    return run(test, SOURCE).returncode == 0


def verdict(mutation: Mutation) -> str:
    """Whether its test sees it."""
    with tempfile.TemporaryDirectory(prefix="gossamer-mutation-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(SOURCE, source)
        if not mutation.made_in(source):
            return "cannot be made: the source reads otherwise now"
        if not passes(mutation.test):
            return "NO JUDGE: the test fails without it"
        done = run(mutation.test, source)
    if done.returncode == 1:
        return "caught"
    return "NOT CAUGHT" if done.returncode == 0 else f"did not run: {done.stdout[-300:]}"


def main(mutations: Sequence[Mutation], names: Sequence[str]) -> int:
    """Try those whose findings begin with these words, or all; 1 if any was missed."""
    missed = tried = 0
    for mutation in mutations:
        if not names or any(mutation.finding.startswith(name) for name in names):
            found = verdict(mutation)
            tried, missed = tried + 1, missed + (found != "caught")
            print(f"{mutation.finding:58} {found:12} {mutation.test}", flush=True)
    print(f"{tried - missed} of {tried} caught")
    return int(missed > 0 or not tried)
