"""Random deaths and freezes: whatever happens to one rank, the others end in time, with an error that says whose fault it is.

python campaigns/kills.py --count 40 --seed 1

Each case starts two to four ranks on this machine that train a small model over gloo, and kills (SIGKILL) or freezes
(SIGSTOP) one of them at a random moment, inside `attach` in two of five cases. It judges every survivor:

- right: `attach` or a step ended with a PeerError that names the victim, within the deadline and some slack, and the
  process ended by itself with exit code 0;
- unnamed: a PeerError that does not name the victim. (Rank 0 is named as the host of the store, too.)
- late: the same, but too long after the victim's last moment;
- raw: another error than ours;
- abort: the process was ended by a signal, as gloo does where an exception leaves a destructor;
- hang: it had not ended long after that.

Exit code 0 if all were right. One case takes about ten seconds; `--only 17` repeats case 17 of the same seed, and prints all that was said.
"""

import argparse
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

RECIPES = (
    "allreduce",
    "terngrad",
    "qsgd",
    "topk(0.1)",
    "powersgd(2)",
    "diana",
    "local_sgd(2)",
    "slowmo(4)",
    "slowmo_sgp(4)",
    "overlap_local_sgd(2)",
    "sgp",
    "sgp",
    "osgp",
    "osgp",
    "backup",
)
PATIENCE = 60.0  # seconds for the ranks to start


@dataclass(frozen=True)
class Case:
    """Who is hit, when, and how."""

    number: int
    recipe: str
    size: int
    victim: int
    blow: signal.Signals
    stage: str  # "attaching" or "attached": what all ranks have said before
    delay: float  # seconds after that

    @staticmethod
    def draw(number: int, seed: int) -> "Case":
        rng = random.Random(f"{seed}/{number}")
        recipe = rng.choice(RECIPES)
        size = rng.randint(3 if recipe == "backup" else 2, 4)
        stage = "attaching" if rng.random() < 0.4 else "attached"
        delay = rng.uniform(0.0, 0.4 if stage == "attaching" else 2.5)
        blow = rng.choice([signal.SIGKILL, signal.SIGSTOP])
        return Case(number, recipe, size, rng.randrange(size), blow, stage, delay)

    def __str__(self) -> str:
        when = f"{self.delay:.3f} s after all were {self.stage}"
        return f"case {self.number}: {self.recipe}, {self.size} ranks, {self.blow.name} to rank {self.victim} {when}"


def rank(port: int, rank: int, size: int, recipe: str, deadline: float) -> None:
    """One rank: train until something is wrong, and say what. All that is printed is a line of words, and the time."""
    import torch
    import torch.distributed as dist

    import gossamer
    from gossamer import kernels

    def say(word: str, text: str = "") -> None:
        print(json.dumps([word, time.time(), text]), flush=True)

    torch.set_num_threads(1)
    kernels.warmup()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    model = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pause = random.Random(rank)
    say("attaching")
    comm = None
    try:
        comm = gossamer.attach(model, optimizer, recipe, deadline=deadline)
        say("attached")
        while True:
            time.sleep(pause.uniform(0.0, 0.02))
            optimizer.zero_grad()
            model(torch.randn(8, 40)).square().mean().backward()
            optimizer.step()
    except gossamer.GossamerError as error:
        say(type(error).__name__, str(error))
    finally:
        if comm is not None:
            comm.detach()


@dataclass
class Rank:
    """A rank that runs, and what it has printed."""

    process: "subprocess.Popen[bytes]"
    out: Path
    err: Path

    def said(self) -> dict[str, tuple[float, str]]:
        lines = self.out.read_text().splitlines(keepends=True)
        return {word: (at, text) for word, at, text in (json.loads(line) for line in lines if line.endswith("\n"))}


def start(case: Case, deadline: float, folder: Path) -> list[Rank]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = list[Rank]()
    for r in range(case.size):
        out, err = folder / f"{r}.out", folder / f"{r}.err"
        words = ["rank", str(port), str(r), str(case.size), case.recipe, str(deadline)]
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen([sys.executable, __file__, *words], stdout=stdout, stderr=stderr)
        ranks.append(Rank(process, out, err))
    return ranks


def strike(case: Case, ranks: list[Rank]) -> float:
    """Wait for the moment, and hit; returns the time."""
    until = time.monotonic() + PATIENCE
    while not all(case.stage in r.said() for r in ranks):
        if time.monotonic() > until:
            raise TimeoutError(f"{case}: not all ranks are {case.stage}: {[r.err.read_text()[-500:] for r in ranks]}")
        time.sleep(0.002)
    time.sleep(case.delay)
    at = time.time()
    ranks[case.victim].process.send_signal(case.blow)
    return at


def judge(case: Case, number: int, rank: Rank, struck: float, limit: float) -> str:
    """What became of a survivor, in one word."""
    code = rank.process.poll()
    if code is None:
        return "hang"
    if code < 0:
        return "abort"
    found = rank.said().get("PeerError")
    if found is None or code:
        return "raw"
    at, text = found
    if not names(text, number, case):
        return "unnamed"
    return "right" if at - struck <= limit else "late"


def names(text: str, number: int, case: Case) -> bool:
    others = text.removeprefix(f"rank {number} of {case.size}:")
    if case.victim == 0 and "The store does not answer" in text:
        return True
    return re.search(rf"\b[Rr]anks? [\d, and]*\b{case.victim}\b", others) is not None


def run(case: Case, deadline: float, slack: float, talk: bool) -> Counter[str]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = start(case, deadline, Path(folder))
        try:
            struck = strike(case, ranks)
            survivors = {r: rank for r, rank in enumerate(ranks) if r != case.victim}
            until = time.monotonic() + deadline + slack + 10.0
            for rank in survivors.values():
                try:
                    rank.process.wait(max(0.1, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    continue
            verdicts = {r: judge(case, r, rank, struck, deadline + slack) for r, rank in survivors.items()}
            took = [rank.said()["PeerError"][0] - struck for rank in survivors.values() if "PeerError" in rank.said()]
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.wait()
        longest = f" (at most {max(took):.1f} s)" if took else ""
        print(f"{case}: {', '.join(verdicts.values())}{longest}", flush=True)
        for r, verdict in verdicts.items():
            if verdict != "right" or talk:
                said, err = ranks[r].said(), ranks[r].err.read_text()[-3000:]
                print(f"  rank {r}, exit {ranks[r].process.returncode}: {said}\n  {err}", flush=True)
    return Counter(verdicts.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--deadline", type=float, default=4.0)
    parser.add_argument("--slack", type=float, default=4.0, help="seconds beyond the deadline that are still in time")
    parser.add_argument("--only", type=int, help="the number of one case")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1"}
    total = Counter[str]()
    for number in range(args.count) if args.only is None else [args.only]:
        total += run(Case.draw(number, args.seed), args.deadline, args.slack, args.only is not None)
    print(", ".join(f"{count} {verdict}" for verdict, count in total.most_common()))
    sys.exit(0 if set(total) <= {"right"} else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        port, number, size, recipe, deadline = sys.argv[2:]
        rank(int(port), int(number), int(size), recipe, float(deadline))
    else:
        main()
