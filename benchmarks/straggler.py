"""One slow rank, always or now and then: what a step takes under DDP, and under recipes that do not wait for it.

python benchmarks/straggler.py [RECIPE ...] [--ranks 4] [--compute 100] [--slow 3:300] [--spikes all:300:0.05] [--steps 40] [--plan]
    [--warm 2]

Computing is a sleep of --compute milliseconds on every rank, so that cores that are shared with others matter little; a
slow rank sleeps for so much longer. Contenders take short turns, undisturbed, with --slow and with --spikes. What is printed
is the median over turns of rank 0's mean step, and its ratio to the contender's own undisturbed step.

`--plan` prints beside it the step that `gossamer plan` predicts, and what was measured as the plan counts: the
mean over turns of the pace of all ranks together, which may make unlike numbers of steps. A plan speaks of paces
once they have settled, so the time of a turn is taken of whole rounds, after four of them at least: in the first,
`by_speed` does not know its ranks yet, and under gossip that overlaps quick ranks run ahead of a slow one for
a few rounds. What is planned computes for `--compute` milliseconds and no more: compare the contender's own
undisturbed step with its plan first.
"""

import argparse
import os
import statistics
import sys
import time
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import torch
import torch.distributed as dist
from ranks import start_ranks
from torch import nn

import gossamer
from gossamer.bench.compare.stragglers import Straggler, sleep
from gossamer.costs import from_flags
from gossamer.costs.laws import SlowRank
from gossamer.planning.baselines import ddp
from gossamer.planning.measured_model import untrained
from gossamer.planning.plan import prepare
from gossamer.planning.work import NoWork

LATENCY = 50e-6  # of a message between processes of one machine
SETTLING = 4  # rounds of a turn before its time is taken


class Turn(NamedTuple):
    """Each rank's seconds a step, and the share of all gradients that were used."""

    paces: list[float]
    used: float

    @property
    def together(self) -> float:
        """Seconds a step of the ranks together, as a plan has it."""
        return len(self.paces) / sum(1 / pace for pace in self.paces)


class Contender:
    """A small model under DDP or a recipe; attached for one turn."""

    def __init__(self, kind: str, compute: float) -> None:
        torch.manual_seed(0)
        self.kind, self.compute, self.turn = kind, compute, 0
        self.model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def take_turn(self, slow: list[str], steps: int, warm: int) -> Turn:
        self.turn += 1
        plain = self.kind == "ddp"
        forward = nn.parallel.DistributedDataParallel(self.model) if plain else self.model
        comm = None if plain else gossamer.attach(self.model, self.optimizer, self.kind)
        period = 1 if comm is None else comm.recipe.schedule.shape.period
        warm, steps = period * max(ceil(warm / period), SETTLING), period * ceil(steps / period)
        dist.barrier()
        began, first, done, drawn = 0.0, 0, 0, 0
        while done < warm + steps:
            if done >= warm and not began:
                began, first = time.perf_counter(), done
            drawn += 1
            self.optimizer.zero_grad()
            loss = forward(torch.randn(8, 64)).square().mean()
            time.sleep(self.compute)
            sleep(slow, dist.get_rank(), drawn, seed=self.turn)
            loss.backward()
            self.optimizer.step()
            done = done + 1 if comm is None else comm.step
        paces = torch.zeros(dist.get_world_size(), dtype=torch.float64)
        paces[dist.get_rank()] = (time.perf_counter() - began) / (done - first)
        used = 1.0 if comm is None else sum(comm.acceptance or [1.0]) / len(comm.acceptance or [1.0])
        if comm is not None:
            comm.finish()  # where ranks count their own steps, those that are ahead answer the others meanwhile
        dist.barrier()
        if comm is not None:
            comm.detach()
        dist.all_reduce(paces)
        return Turn(paces.tolist(), used)


def planned(kind: str, disturbance: str, ranks: int, compute: float) -> float | None:
    """Seconds a step, with links that take no time for this model; None where no law of computing says what is disturbed."""
    if disturbance.startswith("all"):
        return None
    cluster = from_flags(nodes=ranks, latency=LATENCY)
    if disturbance != "undisturbed":
        slow = Straggler.of(disturbance, ranks)
        cluster = replace(cluster, law=SlowRank(1 + slow.seconds / compute, slow.chance, slow.rank or 0))
    model = untrained(Contender("ddp", compute).model, compute, name="small", memory_rate=cluster.memory_rate)
    model = replace(model, on_cores=False)
    found = ddp(model, ranks) if kind == "ddp" else prepare(kind, model, cluster, NoWork())
    return found.seconds(cluster).step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["backup"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--compute", type=float, default=100.0, help="milliseconds")
    parser.add_argument("--slow", default="3:300")
    parser.add_argument("--spikes", default="all:300:0.05")
    parser.add_argument(
        "--steps", type=int, default=40, help="in all turns of a contender and a disturbance; whole rounds in each"
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--warm", type=int, default=2, help="steps of a turn before its time is taken; four rounds at least"
    )
    parser.add_argument("--plan", action="store_true", help="beside what gossamer plan predicts")
    parser.add_argument("--rank", action="store_true", help="set by the program itself")
    args = parser.parse_args()
    if not args.rank:
        sys.exit(start_ranks(args.ranks, port=29533))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    contenders = [Contender(kind, args.compute / 1000) for kind in ["ddp", *args.recipes]]
    disturbances: dict[str, list[str]] = {"undisturbed": [], args.slow: [args.slow], args.spikes: [args.spikes]}
    seen: dict[tuple[str, str], list[Turn]] = {}
    for _ in range(args.turns):
        for name, slow in disturbances.items():
            for contender in contenders:
                outcome = contender.take_turn(slow, max(args.steps // args.turns, 2), args.warm)
                seen.setdefault((contender.kind, name), []).append(outcome)
    if dist.get_rank() == 0:
        print(f"load {os.getloadavg()[0]:.1f}; computing {args.compute:g} ms")
        for (kind, name), turns in seen.items():
            step = 1000 * statistics.median(turn.paces[0] for turn in turns)
            calm = 1000 * statistics.median(turn.paces[0] for turn in seen[kind, "undisturbed"])
            used = statistics.mean(turn.used for turn in turns)
            print(
                f"{kind:36} {name:16} step {step:6.1f} ms   {step / calm:5.2f} x undisturbed   gradients used {used:.2f}"
                + (_beside(planned(kind, name, args.ranks, args.compute / 1000), turns) if args.plan else "")
            )
    dist.barrier()
    os._exit(0)


def _beside(planned: float | None, turns: list[Turn]) -> str:
    """What was planned and measured of all ranks together."""
    measured = statistics.mean(turn.together for turn in turns)
    if planned is None:
        return f"   together {1000 * measured:6.1f}"
    return f"   together {1000 * measured:6.1f}, planned {1000 * planned:6.1f}: {planned / measured - 1:+.1%}"


if __name__ == "__main__":
    main()
