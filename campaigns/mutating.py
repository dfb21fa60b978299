"""Mistakes, made one at a time in a copy of the source: whether the test that should see each does."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
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


def run(tests: Iterable[str], source: Path) -> subprocess.CompletedProcess[str]:
    """Some tests, on some copy of the source."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def verdict(mutation: Mutation) -> str:
    """Whether its test sees it."""
    with tempfile.TemporaryDirectory(prefix="gossamer-mutation-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(SOURCE, source)
        if not mutation.made_in(source):
            return "cannot be made: the source reads otherwise now"
        done = run([mutation.test], source)
    if done.returncode == 1:
        return "caught"
    return "NOT CAUGHT" if done.returncode == 0 else f"did not run: {done.stdout[-300:]}"


def main(mutations: Sequence[Mutation], names: Sequence[str]) -> int:
    """Try those whose findings begin with these words, or all; 1 if any was missed, if there is none, or if a test fails though nothing is wrong."""
    chosen = [m for m in mutations if not names or any(m.finding.startswith(name) for name in names)]
    if not chosen:
        print("none of that name; there are:", *(m.finding for m in mutations), sep="\n")
        return 1
    right = run(dict.fromkeys(m.test for m in chosen), SOURCE)
    if right.returncode:
        print(f"these tests must pass while nothing is wrong:\n{right.stdout[-2000:]}{right.stderr[-2000:]}")
        return 1
    missed = 0
    for mutation in chosen:
        found = verdict(mutation)
        missed += found != "caught"
        print(f"{mutation.finding:58} {found:12} {mutation.test}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return int(missed > 0)
