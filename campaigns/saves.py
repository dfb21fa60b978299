"""Random deaths and freezes inside of `checkpoint.save` and `checkpoint.load`: the others end in time, and say who and where.

python -m campaigns.saves --count 60 --seed 1

From the repository's root. Each case starts two to four ranks on this machine, which train a small model over gloo, and save it
again and again; in one of five cases, what is hit is a load. They are forked from a process that has loaded torch, which is
most of what they would take, and end as any Python process does. One rank kills (SIGKILL) or freezes (SIGSTOP) itself at a random
moment inside, which may be any: the first words of the ranks to one another, the writing, the table at the end. A blow that fell
after the last moment is dealt anew. Every survivor is judged as `campaigns.kills` does: "right" is a PeerError that
names the victim, the call and its step, within the deadline and two seconds, from a process that then ended by itself,
with exit code 0, and never stood still for five seconds; and the folder that was being written is complete, or refused by `load`.

Exit code 0 if all were right. `--only 17` repeats case 17 of the same seed, and prints all that was said.
"""

import argparse
import faulthandler
import gc
import importlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from campaigns.kills import names

RECIPES = (
    "allreduce",
    "qsgd",
    "topk(0.1)",
    "diana",
    "gtopk",
    "slowmo(4)",
    "hierarchical(2, 4)",
    "sgp",
    "osgp",
    "ad_psgd",
)
RECIPES += ("decoupled_diloco(4)", "slowmo(4)", "sgp", "backup")
PATIENCE = 90.0  # seconds for the ranks to start, and to come to the call that is hit
SLACK = 2.0  # seconds beyond the deadline
STILL = 5.0  # seconds in which a process that is ending, however slowly, uses some of its processor


@dataclass(frozen=True)
class Case:
    """Who is hit, in what, how, and how far into it."""

    number: int
    recipe: str
    size: int
    victim: int
    blow: signal.Signals
    call: str  # "save" or "load"
    part: float  # of the time that the call took before

    @staticmethod
    def draw(number: int, seed: int) -> "Case":
        rng = random.Random(f"{seed}/{number}")
        recipe = rng.choice(RECIPES)
        size = 4 if recipe.startswith("hierarchical") else rng.randint(3 if recipe == "backup" else 2, 4)
        size += size % 2 if recipe == "ad_psgd" else 0
        blow, call = rng.choice([signal.SIGKILL, signal.SIGSTOP]), "load" if rng.random() < 0.2 else "save"
        return Case(number, recipe, size, rng.randrange(size), blow, call, rng.random())

    def __str__(self) -> str:
        blow = f"{self.blow.name} to rank {self.victim} after {self.part:.2f} of a {self.call}"
        return f"case {self.number}: {self.recipe}, {self.size} ranks, {blow}"


def rank(case: Case, rank: int, port: int, deadline: float, folder: str) -> None:
    """One rank: train and save until something is wrong, and say what. All that is printed is a line of words, and the time."""
    import torch
    import torch.distributed as dist

    import gossamer
    from gossamer import checkpoint

    def say(word: str, text: str = "") -> None:
        print(json.dumps([word, time.time(), text]), flush=True)

    def strike() -> None:
        say("struck", str(comm.step))
        os.kill(os.getpid(), case.blow)

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=case.size)
    model = torch.nn.Sequential(torch.nn.Linear(400, 3000), torch.nn.Tanh(), torch.nn.Linear(3000, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    comm = gossamer.attach(model, optimizer, case.recipe, deadline=deadline)
    took, number = 0.0, 0
    before = case.call == "load" and comm.recipe.schedule.shape.lane  # these load before the first step only

    def call() -> None:
        """The first two tell how long it takes; all others are hit, on one rank."""
        nonlocal took, number
        number += 1
        path = f"{folder}/{'a' if case.call == 'load' else number}"
        if case.call == "load" and number == 1:
            checkpoint.save(comm, path)
        say("calls", path)
        timer = threading.Timer(case.part * took, strike) if rank == case.victim and number > 2 else None
        if timer is not None:
            timer.start()
        began = time.monotonic()
        (checkpoint.load if case.call == "load" else checkpoint.save)(comm, path)
        took = time.monotonic() - began
        if timer is not None:
            timer.cancel()

    try:
        while True:
            until = comm.step + 4
            while not before and (comm.step < until or not comm.ends_round):
                optimizer.zero_grad()
                model(torch.randn(8, 400)).square().mean().backward()
                optimizer.step()
            call()
    except gossamer.GossamerError as error:
        say(type(error).__name__, str(error))
        faulthandler.dump_traceback_later(4.0)  # who is in the way where the process does not end
    finally:
        comm.detach()


@dataclass
class Rank:
    """A forked process, and what it has printed."""

    process: int
    out: Path
    err: Path
    code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        if self.code is None and (ended := os.waitpid(self.process, os.WNOHANG))[0]:
            self.code = os.waitstatus_to_exitcode(ended[1])
        return self.code

    def ends(self) -> bool:
        """Whether it comes to its end: a process that goes on using its processor is given time, one that stands still is not."""
        before, since = 0, time.monotonic()
        while self.poll() is None:
            if (used := self._used()) != before:
                before, since = used, time.monotonic()
            if time.monotonic() - since > STILL:
                return False
            time.sleep(0.01)
        return True

    def _used(self) -> int:
        """Ticks of its processor, in its own code and in the kernel's."""
        fields = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.process, signal.SIGKILL)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])

    def said(self) -> dict[str, tuple[float, str]]:
        lines = self.out.read_text().splitlines(keepends=True)
        return {word: (at, text) for word, at, text in (json.loads(line) for line in lines if line.endswith("\n"))}


def start(case: Case, deadline: float, folder: Path) -> list[Rank]:
    """Fork the ranks. They go back all the way to the end of the program, so nothing here may be left to clean up."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = list[Rank]()
    for r in range(case.size):
        out, err = folder / f"{r}.out", folder / f"{r}.err"
        out.touch()
        err.touch()
        sys.stdout.flush()
        process = os.fork()
        if not process:
            for number, path in ((1, out), (2, err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
            rank(case, r, port, deadline, str(folder))
            sys.exit(0)
        ranks.append(Rank(process, out, err))
    return ranks


def struck(case: Case, ranks: list[Rank]) -> tuple[float, str, str]:
    """Wait for the blow: when it fell, at which step, and on which folder."""
    until = time.monotonic() + PATIENCE
    while "struck" not in (said := ranks[case.victim].said()):
        ended = [r for r in ranks if r.poll() is not None]
        if time.monotonic() > until or ended:
            raise TimeoutError(f"{case}: no blow: {[(r.said(), r.err.read_text()[-1500:]) for r in ranks]}")
        time.sleep(0.005)
    at, step = said["struck"]
    return at, step, said["calls"][1]


def judge(case: Case, number: int, rank: Rank, at: float, step: str, limit: float) -> str:
    """What became of a survivor, in one word."""
    code, found = rank.poll(), rank.said().get("PeerError")
    if code is None:
        return "stays" if found else "hang"
    if code < 0:
        return "abort"
    if found is None or code:
        return "raw"
    when, text = found
    if not names(text, number, case):
        return "unnamed"
    if f"'checkpoint.{case.call}'" not in text or f"step {step}, " not in text:
        return "misplaced"
    return "right" if when - at <= limit else "late"


def left_behind(path: str) -> str:
    """What `load` says of the folder that was written when the blow fell."""
    from gossamer.checkpoints.folder import Folder
    from gossamer.core.errors import CheckpointError

    try:
        folder = Folder(path)
        for name in folder:
            folder.read(name)
    except CheckpointError as error:
        return "refused" if "not a finished distributed checkpoint" in str(error) else f"damaged: {error}"
    return "complete"


def run(case: Case, deadline: float, talk: bool) -> Counter[str]:
    folder = Path(tempfile.mkdtemp())
    ranks = start(case, deadline, folder)
    try:
        at, step, path = struck(case, ranks)
        survivors = {r: rank for r, rank in enumerate(ranks) if r != case.victim}
        until = at + deadline + SLACK
        while time.time() < until and any(r.poll() is None and "PeerError" not in r.said() for r in survivors.values()):
            time.sleep(0.05)
        for rank in survivors.values():
            rank.ends()
        left = time.time() - at
        verdicts = {r: judge(case, r, rank, at, step, deadline + SLACK) for r, rank in survivors.items()}
        took = [rank.said()["PeerError"][0] - at for rank in survivors.values() if "PeerError" in rank.said()]
        found = left_behind(path)
        if found != "complete" and (case.call == "load" or found != "refused"):
            verdicts[case.victim] = "damaged"
        print(
            f"{case}: {', '.join(verdicts.values())} (at most {max(took, default=0.0):.1f} s, ended after {left:.1f}; {found})",
            flush=True,
        )
        for r, verdict in verdicts.items():
            if verdict != "right" or talk:
                print(
                    f"  rank {r}, exit {ranks[r].code}: {ranks[r].said()}\n  {ranks[r].err.read_text()[-3000:]}",
                    flush=True,
                )
    finally:
        for rank in ranks:
            rank.kill()
        shutil.rmtree(folder)
    return Counter(verdicts.values())


def load() -> None:
    """What every rank needs, before they are forked."""
    os.environ |= {"OMP_NUM_THREADS": "1"}
    for name in ("torch._dynamo", "torch.distributed.checkpoint", "gossamer.integrations.attach", "gossamer.recipes"):
        importlib.import_module(name)
    importlib.import_module("gossamer.kernels").warmup()
    gc.freeze()  # or each rank would look through all of it in the end, for seconds where others compute


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--deadline", type=float, default=4.0)
    parser.add_argument("--only", type=int, help="the number of one case")
    args = parser.parse_args()
    load()
    total = Counter[str]()
    for number in range(args.count) if args.only is None else [args.only]:
        total += run(Case.draw(number, args.seed), args.deadline, args.only is not None)
    print(", ".join(f"{count} {verdict}" for verdict, count in total.most_common()))
    sys.exit(0 if set(total) <= {"right"} else 1)


if __name__ == "__main__":
    main()
