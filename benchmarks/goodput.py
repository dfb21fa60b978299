"""Steps that count where one host is lost every 40 seconds, and what `gossamer goodput` says of the same run.

python benchmarks/goodput.py [RECIPE ...] [--minutes 10] [--hosts 4] [--rate 200mbit] [--every 40] [--away 10] [--compute 150]

A recipe trains under gossamer.members(); "torchrun RECIPE" trains under torchrun, which restarts all ranks, with a checkpoint about
every --save seconds. Hosts are those of a lab; all but the first, which has the store, are lost in turns: all their processes are
killed, and --away seconds later another machine is there in their place, with a name of its own. Computing is a sleep of --compute
milliseconds, so that cores that hosts share matter little. The clock runs from when all have stepped; all end together, killed.

What a run reached is counted twice. Here: steps that each rank wrote into a log of its own, less those done again or lost with a
round, times the seconds of an undisturbed step (the mean until the first loss), over the seconds that hosts were there, the first start
included; without it, it is said besides. And by `gossamer goodput`, from the events.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TORCHRUN = "torchrun "
WIDTH, LAYERS, BATCH = 512, 8, 16
SETTLES = 10  # steps of a process before its pace is that of others
PATIENCE = 240.0  # seconds until all have stepped


@dataclass(frozen=True)
class Disturbance:
    """When which host is lost; all times are on the clock of this machine, which the hosts of a lab share."""

    began: float
    seconds: float
    every: float
    away: float
    hosts: int

    @property
    def end(self) -> float:
        return self.began + self.seconds

    def losses(self, host: int) -> Iterator[float]:
        """The times at which a host is lost; another one may have taken its place by the next."""
        count = int(self.seconds / self.every)
        for number in range(1, count + 1):
            at = self.began + number * self.every
            if 1 + (number - 1) % (self.hosts - 1) == host and at < self.end:
                yield at


# -- the trainer, on a host ------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    """Train until killed, and log every step."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import gossamer

    torch.set_num_threads(1)
    restarts, folder = args.train.startswith(TORCHRUN), Path(args.folder)
    group = None if restarts else gossamer.members()
    if restarts:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recipe = args.train.removeprefix(TORCHRUN)
    with gossamer.attach(model, optimizer, recipe, group, events=folder / "events") as comm:
        if restarts:
            gossamer.checkpoint.resume(comm, folder / "saves")
        log = os.open(
            folder / f"log{os.environ['RANK']}.{time.monotonic():.3f}", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        shape = comm.recipe.schedule.shape
        os.write(log, f"{1 if shape.averages_gradients else shape.period}\n".encode())
        saves = Saves(args.save) if restarts else None
        while True:
            x = torch.randn(BATCH, WIDTH)
            optimizer.zero_grad()
            loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
            time.sleep(args.compute / 1000)
            loss.backward()
            optimizer.step()
            os.write(log, f"{time.monotonic():.4f} {comm.step}\n".encode())
            if saves is not None and saves.are_due(comm.step):
                gossamer.checkpoint.save(comm, folder / "saves" / f"step{comm.step}")


class Saves:
    """Checkpoints so many seconds apart, at steps that are the same on all ranks: by the pace of their first steps."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.every = seconds, 0
        self._times = list[float]()

    def are_due(self, step: int) -> bool:
        import torch
        import torch.distributed as dist

        if not self.every:
            self._times.append(time.monotonic())
            if len(self._times) <= SETTLES:
                return False
            pace = torch.tensor([(self._times[-1] - self._times[0]) / SETTLES])
            dist.all_reduce(pace)
            self.every = max(1, round(self.seconds * dist.get_world_size() / float(pace)))
        return step % self.every == 0


# -- a host: starts its trainer, and loses it ------------------------------------------------------------------------------


def host(args: argparse.Namespace) -> None:
    """Be a host of the lab: run the trainer, take it away at its times, give another machine in its place."""
    rank, there, name = int(os.environ["RANK"]), list[tuple[float, float]](), socket.gethostname()
    begin, process, machine = time.monotonic(), start(args, rank), 0
    began = all_step(Path(args.folder), rank, args.hosts, process)
    plan = Disturbance(began, args.minutes * 60, args.every, args.away, args.hosts)
    for lost in [*plan.losses(rank), plan.end]:
        if machine:
            begin, process = time.monotonic(), start(args, rank)
        while time.monotonic() < lost:
            time.sleep(min(0.05, max(0.0, lost - time.monotonic())))
            if process.poll() is not None and time.monotonic() < lost:
                print(f"host {rank}: the trainer ended with {process.returncode}; started again", flush=True)
                time.sleep(1.0)
                process = start(args, rank)
        kill(process)
        there.append((begin, time.monotonic()))
        if lost < plan.end:
            machine += 1
            socket.sethostname(f"{name}-{machine}")
            time.sleep(max(0.0, min(args.away, plan.end - time.monotonic())))
    (Path(args.folder) / f"there{rank}.json").write_text(json.dumps(there))


def all_step(folder: Path, rank: int, hosts: int, process: "subprocess.Popen[bytes]") -> float:
    """Wait until all ranks have stepped, and return the time of that, which is the same for all."""
    told, until = folder / "began", time.monotonic() + PATIENCE
    while not told.exists():
        logs = [*folder.glob("log*")] if rank == 0 else []
        if len(logs) >= hosts and all(_log(path)[1] for path in logs):
            (folder / "begins").write_text(str(time.monotonic()))
            (folder / "begins").rename(told)
        if process.poll() is not None:
            raise SystemExit(f"host {rank}: the trainer ended with {process.returncode} before all ranks had stepped")
        if time.monotonic() > until:
            raise SystemExit(f"host {rank}: not all ranks have stepped within {PATIENCE:.0f} seconds")
        time.sleep(0.05)
    return float(told.read_text())


def start(args: argparse.Namespace, rank: int) -> "subprocess.Popen[bytes]":
    script = [os.path.abspath(__file__), "--train", args.host, "--folder", args.folder]
    script += ["--compute", str(args.compute), "--save", str(args.save)]
    environment = dict(os.environ)
    command = [sys.executable, *script]
    if args.host.startswith(TORCHRUN):
        port = int(os.environ["MASTER_PORT"])
        where = f"{os.environ['MASTER_ADDR']}:{port}"
        for each in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(each, None)
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        launcher = ["-m", "torch.distributed.run", "--nnodes", str(args.hosts), "--nproc-per-node", "1"]
        launcher += ["--max-restarts", "1000", "--rdzv-backend", "c10d", "--rdzv-endpoint", where, "--rdzv-id", "run"]
        launcher += ["--rdzv-conf", f"is_host={int(rank == 0)}"]  # else it looks for its own name, which is new
        command = [sys.executable, *launcher, "--local-addr", f"10.0.0.{rank + 1}", *script]
    with (Path(args.folder) / f"said{rank}.txt").open("ab") as said:
        return subprocess.Popen(command, env=environment, stdout=said, stderr=said)


def kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and all that it has started, wherever it has gone."""
    children = dict[int, list[int]]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
        except (OSError, ValueError):
            continue
    found, waiting = list[int](), [process.pid]
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], [])
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


# -- what came out ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """What the logs of all ranks say."""

    steps: float  # that count
    step: float  # seconds of an undisturbed one
    there: float  # seconds of all hosts
    at_first: float  # of which before all had stepped
    processes: int

    @property
    def share(self) -> float:
        return self.steps * self.step / self.there

    @property
    def after_start(self) -> float:
        return self.steps * self.step / (self.there - self.at_first)


def count(folder: Path, plan: Disturbance) -> Counted:
    """Count the steps of a run, from the logs of its ranks."""
    counted, paces, processes = 0, list[float](), 0
    for rank in range(plan.hosts):
        logs = [_log(path) for path in sorted(folder.glob(f"log{rank}.*"), key=_born)]
        logs = [each for each in logs if each[1]]
        processes += len(logs)
        for i, (period, steps) in enumerate(logs):
            again = min((later[0][1] for _, later in logs[i + 1 :]), default=10**12) - 1
            kept = [number for _, number in steps if number <= again]
            if i + 1 < len(logs) and again >= steps[-1][1]:  # others went on: they have all up to the last round
                kept = [number for number in kept if number <= steps[-1][1] - steps[-1][1] % period]
            counted += len(kept)
        period, steps = logs[0]
        calm = [at for at, _ in steps if at < plan.began + plan.every][SETTLES:]
        whole = (len(calm) - 1) // period * period
        paces.append((calm[whole] - calm[0]) / whole)
    spans = [json.loads(p.read_text()) for p in folder.glob("there*.json")]
    there = sum(end - begin for each in spans for begin, end in each)
    at_first = sum(plan.began - each[0][0] for each in spans)
    return Counted(counted, statistics.mean(paces), there, at_first, processes)


def _born(path: Path) -> float:
    return float(path.name.partition(".")[2])


def _log(path: Path) -> tuple[int, list[tuple[float, int]]]:
    period, *lines = path.read_text().splitlines() or ["1"]
    return int(period), [(float(at), int(number)) for at, number in (line.split() for line in lines)]


def measure(args: argparse.Namespace, contender: str) -> str:
    """One run in a lab; a row of the table."""
    from gossamer.bench.lab import run_lab
    from gossamer.costs.goodput import goodput_of
    from gossamer.costs.spent import CAUSES

    folder = Path(args.keep or tempfile.mkdtemp(prefix="goodput-")) / contender.replace(" ", "-")
    folder.mkdir(parents=True)
    command = [sys.executable, os.path.abspath(__file__), "--host", contender, "--folder", str(folder)]
    for name in ("minutes", "hosts", "every", "away", "compute", "save"):
        command += [f"--{name}", str(getattr(args, name))]
    result = run_lab(args.hosts, args.rate, command, timeout=args.minutes * 60 + PATIENCE + 30)
    if result.exit_code or not any(folder.glob("log*")):
        said = [line for path in sorted(folder.glob("said*.txt")) for line in path.read_text().splitlines()[-1:]]
        return f"{contender:28} was not measured: {' '.join(said[:1])}"
    began = float((folder / "began").read_text())
    plan = Disturbance(began, args.minutes * 60, args.every, args.away, args.hosts)
    ours, told = count(folder, plan), goodput_of(folder / "events")
    spent = told.spent
    causes = ", ".join(f"{CAUSES[c]} {v / spent.paid:.3f}" for c, v in spent.by_cause.items() if c != "steps")
    if not args.keep:
        shutil.rmtree(folder.parent)
    return (
        f"{contender:28} counted {ours.share:.3f} ({ours.after_start:.3f} without the first start), gossamer goodput {spent.share:.3f} ({100 * (spent.share / ours.share - 1):+.1f} %); "
        f"step {1000 * ours.step:.0f} ms, {ours.steps:.0f} steps that count ({spent.counted:.0f} by events), hosts there "
        f"{ours.there:.0f} s (paid {spent.paid:.0f} s), {ours.processes} processes; {causes}"
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["decoupled_diloco(24)", "local_sgd(8)", "qsgd", "torchrun qsgd"])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--every", type=float, default=40.0, help="seconds from one loss to the next")
    parser.add_argument("--away", type=float, default=10.0, help="seconds until another machine is there")
    parser.add_argument("--compute", type=float, default=150.0, help="milliseconds")
    parser.add_argument("--save", type=float, default=30.0, help="seconds between two checkpoints, under torchrun")
    parser.add_argument("--keep", help="a folder for the logs and events of all runs; else they are removed")
    for name in ("--host", "--train", "--folder"):
        parser.add_argument(name, help="set by the program itself")
    args = parser.parse_args(words)
    if args.train:
        train(args)
    elif args.host:
        host(args)
    else:
        for contender in args.recipes:
            print(measure(args, contender), flush=True)


if __name__ == "__main__":
    main()
