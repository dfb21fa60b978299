"""What `members()` costs while nobody comes or goes: time of a step with it over that of a step without it, on loopback.

python benchmarks/members.py [RECIPE ...] [--ranks 2] [--turns 20] [--steps 8] [--model lm|mlp] [--port 29610] [--json FILE]

Each way has processes of its own, of one thread each, and the two ways take short turns in a random order, while the other
way's processes wait. A turn's first steps are not counted. The ratio is that of one turn with members to the turn without them
beside it; the median of all turns is printed, and the interval that holds 95 of 100 resamplings of the turns. Processor time is
that of all threads of a rank's process, the heartbeat's too; while others use the machine it is the one to look at.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from ranks import start_ranks

import gossamer
from gossamer.bench.workloads.transformer import Transformer

RECIPES = ["allreduce", "qsgd", "topk", "local_sgd(8)"]
WAYS = ("without", "with")
WARM, RESAMPLINGS = 3, 2000
BAR = 1.05


class Turn(NamedTuple):
    """A way's mean step, in milliseconds: of processor time per rank, and by the clock."""

    processor: float
    clock: float


def step_of(kind: str, recipe: str, group: object) -> tuple[Callable[[], None], gossamer.Communicator]:
    """One training step of a model, and its communicator."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    if kind == "lm":
        model = Transformer()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    else:
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    comm = gossamer.attach(model, optimizer, recipe, group)  # type: ignore[arg-type]

    def step() -> None:
        optimizer.zero_grad()
        if kind == "lm":
            loss = model(torch.randint(2048, (4, 33), generator=generator))
        else:
            loss = model(torch.randn(32, 256, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()

    return step, comm


def take_turn(step: Callable[[], None], steps: int, crew: dist.ProcessGroup) -> Turn:
    for _ in range(steps):  # whole rounds, and caches that the other way has used
        step()
    dist.barrier(crew)
    began, used = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    mine = torch.tensor([time.process_time() - used, time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(mine, group=crew)
    processor, clock = (1000 * mine / steps / dist.get_world_size(crew)).tolist()
    return Turn(processor, clock)


def measure(arguments: argparse.Namespace, place: int, recipe: str) -> dict[str, list[Turn]]:
    """All turns of both ways, on every rank."""
    ranks, rank = arguments.ranks, dist.get_rank()
    crews = [dist.new_group([*range(way * ranks, (way + 1) * ranks)]) for way in range(2)]
    mine, group = rank // ranks, crews[rank // ranks]
    os.environ |= {"RANK": str(rank % ranks), "WORLD_SIZE": str(ranks)}
    crowd = gossamer.members(store=f"127.0.0.1:{arguments.port + 1 + place}") if mine else group
    step, comm = step_of(arguments.model, recipe, crowd)
    taken: dict[str, list[Turn]] = {way: [] for way in WAYS}
    rng = random.Random(0)  # the same on all ranks
    for turn in range(WARM + arguments.turns):
        for way in rng.sample(range(2), 2):
            result = torch.zeros(2, dtype=torch.float64)
            if way == mine:
                result += torch.tensor(take_turn(step, arguments.steps, group), dtype=torch.float64)
            dist.broadcast(result, way * ranks)
            if turn >= WARM:
                taken[WAYS[way]].append(Turn(*result.tolist()))
    comm.detach()
    dist.barrier()
    return taken


def ratio(taken: dict[str, list[Turn]], of: str) -> tuple[float, float, float]:
    """The median ratio of two turns side by side, and its interval."""
    each = [getattr(w, of) / getattr(wo, of) for w, wo in zip(taken["with"], taken["without"], strict=True)]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(each, k=len(each))) for _ in range(RESAMPLINGS))
    return statistics.median(each), medians[RESAMPLINGS // 40], medians[-RESAMPLINGS // 40]


def report(recipe: str, taken: dict[str, list[Turn]]) -> dict[str, object]:
    line: dict[str, object] = {"recipe": recipe}
    for of in ("processor", "clock"):
        middle, low, high = ratio(taken, of)
        with_, without = (statistics.median(getattr(t, of) for t in taken[way]) for way in ("with", "without"))
        line |= {of: round(middle, 4), f"{of}_interval": [round(low, 4), round(high, 4)]}
        line |= {f"{of}_ms": [round(with_, 3), round(without, 3)]}
        print(
            f"{recipe:16} {of:9} {middle:.3f} ({low:.3f} to {high:.3f})   {with_:.2f} ms with, {without:.2f} ms without",
            flush=True,
        )
    return line


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=RECIPES, metavar="RECIPE")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--model", choices=("lm", "mlp"), default="lm")
    parser.add_argument("--port", type=int, default=29610)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if not arguments.rank:
        return start_ranks(2 * arguments.ranks, arguments.port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, lines = dist.get_rank(), list[dict[str, object]]()
    for place, recipe in enumerate(arguments.recipes):
        taken = measure(arguments, place, recipe)
        if not rank:
            lines.append(report(recipe, taken))
    if arguments.json and not rank:
        arguments.json.write_text(json.dumps(lines, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
