"""One machine half as fast: how long until a model is as good as with equal shares, where a step's samples, or a round's local
steps, are shared out by speed.

python benchmarks/unequal.py [RECIPE ...] [--ranks 4] [--samples 64] [--compute 2] [--slow 3:2] [--steps 120]

Computing is a sleep of --compute milliseconds a sample on every rank, --slow RANK:TIMES as many on one, so that cores that
are shared with others matter little. Every recipe trains with equal shares and, where it averages gradients, with
`comm.share`; where it averages models, as it is and as `by_speed(...)`. A contender's target is the loss on held-out data that
its form of equal shares ends with. Time is rank 0's, without judging.
"""

import argparse
import os
import sys
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from ranks import start_ranks
from torch import Tensor, nn

import gossamer
from gossamer.core.errors import RecipeError
from gossamer.recipe import Recipe
from gossamer.schedules import BySpeed

JUDGE = 8  # steps between two looks at the held-out loss


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))


TEACHER = network(1)


def draw(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(samples, 16, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return x, 3 * TEACHER(x)


HELD_OUT = draw(2000, 0)


def train(
    recipe: Recipe, shared: bool, samples: int, second: float, steps: int, target: float | None
) -> tuple[list[float], float, float]:
    """Each rank's samples or steps; seconds, and the loss at the end: that of `steps`, or of reaching the target."""
    rank, size, model = dist.get_rank(), dist.get_world_size(), network(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    spent, drawn, taken, mine, loss, last = 0.0, 0, 0, 0, float("inf"), 0
    with gossamer.attach(model, optimizer, recipe) as comm:
        while comm.step < (steps if target is None else 2 * steps):
            began = time.perf_counter()
            mine = comm.share(samples) if shared else samples // size
            x, y = draw(mine, 1 + rank + size * (drawn := drawn + 1))
            time.sleep(mine * second)
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            spent, taken = spent + time.perf_counter() - began, taken + 1
            if comm.step // JUDGE > last and recipe.schedule.ends_round(comm.step):
                last = comm.step // JUDGE
                with torch.no_grad():
                    loss = float((model(HELD_OUT[0]) - HELD_OUT[1]).square().mean())
                if target is not None and loss <= target:  # models are equal here, and so is what they come to
                    break
        each: list[float] = [0.0] * size
        dist.all_gather_object(each, float(mine if shared else taken))
    return each, spent, loss


def by_speed(recipe: Recipe) -> Recipe | None:
    """Local steps by speed, where it has rounds of them."""
    try:
        return replace(recipe, schedule=BySpeed(recipe.schedule))
    except RecipeError:
        return None


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["allreduce", "qsgd", "local_sgd(8)"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--samples", type=int, default=64, help="of all ranks in a step")
    parser.add_argument("--compute", type=float, default=2.0, help="milliseconds a sample")
    parser.add_argument("--slow", default="3:2", help="RANK:TIMES: who takes how many times as long")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rank", action="store_true", help="set by the program itself")
    args = parser.parse_args()
    if not args.rank:
        sys.exit(start_ranks(args.ranks, port=29535))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    slow, times = args.slow.split(":")
    second = args.compute / 1000 * (float(times) if dist.get_rank() == int(slow) else 1.0)
    speeds = args.ranks - 1 + 1 / float(times)
    say(
        f"load {os.getloadavg()[0]:.1f}; the least that shares by speed can take: {args.ranks / float(times) / speeds:.2f}"
    )
    for text in args.recipes:
        plain = Recipe.of(text)
        paced = by_speed(plain)
        _, equal, target = train(plain, False, args.samples, second, args.steps, None)
        each, spent, loss = train(paced or plain, paced is None, args.samples, second, args.steps, target)
        what = "samples" if paced is None else "steps"
        told = f"loss {target:.4f} in {equal:.1f} s; by speed {loss:.4f} in {spent:.1f} s, {spent / equal:.2f} of that"
        say(f"{text:30} {told}; {what} of each rank: {', '.join(f'{n:g}' for n in each)}")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
