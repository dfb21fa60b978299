"""Interrupted and resumed runs: `python -m campaigns.resumes [COUNT] [SEED]`, from the repository's root.

Each run of `gossamer train` is interrupted up to three times, by SIGTERM, SIGINT or SIGKILL at random moments, and resumed;
what it leaves must be equal to what the same run leaves that nobody interrupted: steps, losses, qualities, bytes and table.
Each run of `gossamer compare` is interrupted once; it cannot be resumed, and what it leaves must be the beginning of the
whole. Prints what was wrong, and counts.
"""

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.bench.cli.conftest import Shell

from gossamer.bench.record import Record, Run
from gossamer.bench.report.study import study_of

STEPS = 300
COMMON = ("--workload", "ridge", "--hosts", "2")
TRAIN = ("--steps", str(STEPS), "--checkpoint-every", "10", "--deadline", "20")
COMPARE = ("ddp", "qsgd", "overlap_local_sgd(4)", *COMMON, "--steps", "60", "--patience", "1", "--deadline", "20")
RECIPES = [
    *("terngrad", "qsgd + slowmo(3)", "scatter(qsgd()) + overlap_local_sgd(8)", "osgp", "powersgd", "ddp"),
    *("topk(ratio=0.1) + local_sgd(4)", "backup(backups=0)", "accordion_batch(epoch=20)"),
]
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGKILL]
OVERLAPPED = ("overlap_local_sgd", "osgp", "backup")  # at a step, a message may have arrived or not
LONGEST = 120.0  # seconds; a command that takes longer hangs


class Campaign:
    """Runs, faults and what came of them."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng, self.folder = random.Random(seed), folder
        self.counts = Counter[str]()
        self.whole = dict[str, Record]()
        self.seconds = dict[str, float]()  # that each of them took

    def train(self, number: int) -> None:
        recipe = self.rng.choice(RECIPES)
        words = ("train", recipe, *COMMON, *TRAIN, "--json")
        out, story = self.folder / f"train{number}", [recipe]
        reference = self._reference(recipe, words)
        begun = False
        for _ in range(self.rng.randint(1, 3)):
            number = self.rng.choice(SIGNALS)
            story.append(number.name)
            self._command((*words, "--out", str(out), *["--resume"] * begun), number, story)
            begun = any((out / "checkpoint").glob("step*-rank0.pt")) and any(
                (out / "checkpoint").glob("step*-rank1.pt")
            )
            if begun and self._ended(out):
                break
        self._command((*words, "--out", str(out), *["--resume"] * begun), None, story)
        self._judge(differences(read(out), reference), story)

    def compare(self, number: int) -> None:
        words = ("compare", *COMPARE, "--json")
        out, reference = self.folder / f"compare{number}", self._reference("compare", words)
        how = self.rng.choice(SIGNALS)
        story = ["compare", how.name]
        self._command((*words, "--out", str(out)), how, story)
        self._judge(beginnings(read(out), reference), story)

    def _reference(self, name: str, words: Sequence[str]) -> Record:
        if name not in self.whole:
            out, began = self.folder / f"whole{len(self.whole)}", time.monotonic()
            self._command((*words, "--out", str(out)), None, [name, "whole"])
            self.seconds[name] = time.monotonic() - began
            found = read(out)
            assert found is not None, f"{name} did not run"
            self.whole[name] = found
        return self.whole[name]

    def _ended(self, out: Path) -> bool:
        found = read(out)
        return found is not None and found.runs[0].status == "ok"

    def _command(self, words: Sequence[str], interruption: signal.Signals | None, story: list[str]) -> None:
        """Run to the end, or until interrupted, at some moment of what the whole of the story's first word takes."""
        shell = Shell(self.folder)
        process = shell.start(*words)
        out, err = "", ""
        try:
            patience = LONGEST if interruption is None else self.rng.uniform(0.0, self.seconds[story[0]])
            out, err = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            if interruption is None:
                self._note("hangs", story)
                process.kill()
            else:
                process.send_signal(interruption)
            try:
                out, err = process.communicate(timeout=LONGEST)
            except subprocess.TimeoutExpired:
                self._note("hangs", story)
        self.counts["commands"] += 1
        if "Traceback" in out + err:
            self._note("raw errors", [*story, err[-500:]])
        expected = {0} if interruption is None else {0, 128 + interruption, -interruption}
        if process.returncode not in expected:
            self._note("wrong", [*story, f"exit code {process.returncode}", err[-500:]])
        try:
            shell.expect_nothing()
        except AssertionError as left:
            self._note("left behind", [*story, str(left)])
            shell.end()

    def _judge(self, wrong: list[str], story: list[str]) -> None:
        self.counts["runs"] += 1
        if wrong:
            self._note("wrong", [*story, *wrong])

    def _note(self, what: str, story: Sequence[str]) -> None:
        self.counts[what] += 1
        print(f"{what}: {', '.join(story)}", flush=True)


def read(folder: Path) -> Record | None:
    try:
        return Record.read(folder / "record.json")
    except FileNotFoundError:
        return None


def differences(found: Record | None, whole: Record) -> list[str]:
    """What a run that was interrupted and resumed left otherwise than one that was not."""
    if found is None:
        return ["no record"]
    (ours,), (theirs,) = found.runs, whole.runs
    pairs = {
        "status": (ours.status, theirs.status),
        "steps": ([s.step for s in ours.steps], [s.step for s in theirs.steps]),
        "losses": ([s.loss for s in ours.steps], [s.loss for s in theirs.steps]),
        "qualities": (
            [(e.step, e.quality) for e in ours.evaluations],
            [(e.step, e.quality) for e in theirs.evaluations],
        ),
        "residuals": (ours.residuals, theirs.residuals),
        "decisions": (ours.decisions, theirs.decisions),
        "bytes": ((ours.wire_bytes, ours.logical_bytes), (theirs.wire_bytes, theirs.logical_bytes)),
        "errors": (ours.layer_errors, theirs.layer_errors),
        "table": table(found, whole),
    }
    if not any(name in ours.name for name in OVERLAPPED):
        pairs["bytes at each step"] = [s.sent for s in ours.steps], [s.sent for s in theirs.steps]
    clock = [s.seconds for s in ours.steps]
    pairs["clock"] = clock, sorted(clock)
    return [f"{name}: {str(a)[:200]} instead of {str(b)[:200]}" for name, (a, b) in pairs.items() if a != b]


def table(found: Record, whole: Record) -> tuple[object, object]:
    """The table's numbers that are no times."""
    rows = study_of(found).rows[0], study_of(whole).rows[0]
    ours, theirs = ((row.run.done, row.final, row.wire_step) for row in rows)
    return ours, theirs


def beginnings(found: Record | None, whole: Record) -> list[str]:
    """What in an interrupted comparison is not the beginning of the whole one."""
    if found is None:  # nothing had been learned yet
        return []
    wrong = list[str]()
    for ours, theirs in zip(found.runs, whole.runs, strict=True):
        for what, a, b in traces(ours, theirs):
            if a != b[: len(a)]:
                wrong.append(f"{ours.name}: {what} {str(a)[:200]} do not begin {str(b)[:200]}")
    return wrong


def traces(ours: Run, theirs: Run) -> list[tuple[str, list[object], list[object]]]:
    return [
        ("losses", [(s.step, s.loss) for s in ours.steps], [(s.step, s.loss) for s in theirs.steps]),
        (
            "qualities",
            [(e.step, e.quality) for e in ours.evaluations],
            [(e.step, e.quality) for e in theirs.evaluations],
        ),
    ]


def main(count: int = 50, seed: int = 0) -> int:
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(seed, Path(folder))
        for number in range(count):
            campaign.compare(number) if number % 5 == 4 else campaign.train(number)
            shown = " ".join(f"{n} {what}" for what, n in campaign.counts.items())
            print(f"{number + 1} of {count}: {shown}", flush=True)
    faults = ("wrong", "raw errors", "hangs", "left behind")
    counts = campaign.counts
    told = ", ".join(f"{counts[fault]} {fault}" for fault in faults)
    print(f"{counts['runs']} runs, {counts['commands']} commands: {told}")
    return int(any(counts[fault] for fault in faults))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
