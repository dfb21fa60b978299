"""One slow rank, always or now and then: what a step takes under DDP, and under recipes that do not wait for it.

python benchmarks/straggler.py [RECIPE ...] [--ranks 4] [--compute 100] [--slow 3:300] [--spikes all:300:0.05] [--steps 40]

Computing is a sleep of --compute milliseconds on every rank, so that cores that are shared with others matter little; a
slow rank sleeps for so much longer. Contenders take short turns, undisturbed, with --slow and with --spikes. What is printed
is the median over turns of rank 0's mean step, and its ratio to the contender's own undisturbed step.
"""

import argparse
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from ranks import start_ranks
from torch import nn

import gossamer
from gossamer.bench.compare.stragglers import sleep

TURNS = 5


class Contender:
    """A small model under DDP or a recipe; attached for one turn."""

    def __init__(self, kind: str, compute: float) -> None:
        torch.manual_seed(0)
        self.kind, self.compute, self.turn = kind, compute, 0
        self.model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def take_turn(self, slow: list[str], steps: int) -> tuple[float, float]:
        """Rank 0's seconds a step, and the share of all gradients that were used."""
        self.turn += 1
        plain = self.kind == "ddp"
        forward = nn.parallel.DistributedDataParallel(self.model) if plain else self.model
        comm = None if plain else gossamer.attach(self.model, self.optimizer, self.kind)
        dist.barrier()
        began, done, drawn = time.perf_counter(), 0, 0
        while done < steps:
            drawn += 1
            self.optimizer.zero_grad()
            loss = forward(torch.randn(8, 64)).square().mean()
            time.sleep(self.compute)
            sleep(slow, dist.get_rank(), drawn, seed=self.turn)
            loss.backward()
            self.optimizer.step()
            done = done + 1 if comm is None else comm.step
        seconds = (time.perf_counter() - began) / steps
        used = 1.0 if comm is None else sum(comm.acceptance or [1.0]) / len(comm.acceptance or [1.0])
        if comm is not None:
            comm.finish()  # where ranks count their own steps, those that are ahead answer the others meanwhile
        dist.barrier()
        if comm is not None:
            comm.detach()
        return seconds, used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["backup"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--compute", type=float, default=100.0, help="milliseconds")
    parser.add_argument("--slow", default="3:300")
    parser.add_argument("--spikes", default="all:300:0.05")
    parser.add_argument("--steps", type=int, default=40, help="in all turns of a contender and a disturbance")
    parser.add_argument("--rank", action="store_true", help="set by the program itself")
    args = parser.parse_args()
    if not args.rank:
        sys.exit(start_ranks(args.ranks, port=29533))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    contenders = [Contender(kind, args.compute / 1000) for kind in ["ddp", *args.recipes]]
    disturbances: dict[str, list[str]] = {"undisturbed": [], args.slow: [args.slow], args.spikes: [args.spikes]}
    seen: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(TURNS):
        for name, slow in disturbances.items():
            for contender in contenders:
                outcome = contender.take_turn(slow, max(args.steps // TURNS, 2))
                seen.setdefault((contender.kind, name), []).append(outcome)
    if dist.get_rank() == 0:
        print(f"load {os.getloadavg()[0]:.1f}; computing {args.compute:g} ms")
        for (kind, name), turns in seen.items():
            step = 1000 * statistics.median(seconds for seconds, _ in turns)
            calm = 1000 * statistics.median(seconds for seconds, _ in seen[kind, "undisturbed"])
            used = statistics.mean(used for _, used in turns)
            print(
                f"{kind:24} {name:16} step {step:6.1f} ms   {step / calm:5.2f} x undisturbed   gradients used {used:.2f}"
            )
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
