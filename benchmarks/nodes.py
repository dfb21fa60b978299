"""Several ranks behind one network card: what two levels save, in a lab whose hosts have several ranks.

gossamer lab --hosts 2 --per-host 4 --rate 100mbit -- python benchmarks/nodes.py [RECIPE ...] [--rounds 3] [--steps 3]

Every recipe runs as it is, and in two levels: `RECIPE + per_node(4)`. `card_mb` is what a host's card sends per step, by its
own counter, and `counted_mb` what `bytes_between` says beforehand. A step's milliseconds are the median over rounds of the
slowest rank's. The last lines say what the two levels must hold: a card sends at most 1.1 times what was counted, and a step
is quicker than one of the flat form and one of `allreduce` in two levels.
"""

import argparse
import os
import statistics
import time
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import gossamer
from gossamer.lab import own_counters
from gossamer.planning import bytes_between
from gossamer.workloads.transformer import Transformer

ALONE, DENSE = "compute", "allreduce"


class Row(NamedTuple):
    """What a step took, and what a card sent for it; in millions of bytes."""

    milliseconds: float
    card: float
    counted: float


def measure(text: str, per_host: int, rounds: int, steps: int) -> Row:
    """One recipe, or computing alone."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seconds, sent = list[float](), list[int]()
    with nullcontext() if text == ALONE else gossamer.attach(model, optimizer, text):
        batch = torch.randint(2048, (2, 17), generator=torch.Generator().manual_seed(dist.get_rank()))
        for r in range(rounds + 1):
            before = own_counters().sent_bytes
            dist.barrier()
            began = time.perf_counter()
            for _ in range(steps):
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
            mine = torch.tensor([time.perf_counter() - began])
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            if r:  # the first round compiles and warms up
                seconds.append(float(mine) / steps)
                sent.append((own_counters().sent_bytes - before) // steps)
    shapes: dict[str, Tensor] = dict(model.named_parameters())
    counted = 0.0 if text == ALONE else bytes_between(text, shapes, dist.get_world_size(), per_host) / 1e6
    row = Row(1000 * statistics.median(seconds), statistics.median(sent) / 1e6, counted)
    if dist.get_rank() == 0:
        print(
            f"{text:28} step {row.milliseconds:6.0f} ms   card_mb {row.card:6.2f}   counted_mb {row.counted:6.2f}",
            flush=True,
        )
    return row


def verdict(text: str, flat: Row, two: Row, dense: Row) -> str:
    """Whether a recipe in two levels holds what it must."""
    bytes_hold = two.card <= 1.1 * two.counted
    return (
        f"{text:28} card / counted {two.card / two.counted:.3f} ({'holds' if bytes_hold else 'too many'}), "
        f"step {two.milliseconds / flat.milliseconds:.2f} of flat, {two.milliseconds / dense.milliseconds:.2f} of dense in two levels"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["terngrad", "qsgd", "topk", "powersgd"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    per_host = int(os.environ["LOCAL_WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measure(ALONE, per_host, args.rounds, args.steps)
    found = dict[str, tuple[Row, Row]]()
    for recipe in dict.fromkeys([DENSE, *args.recipes]):
        flat, two = (
            measure(text, per_host, args.rounds, args.steps) for text in (recipe, f"{recipe} + per_node({per_host})")
        )
        found[recipe] = flat, two
    if dist.get_rank() == 0:
        for recipe, (flat, two) in found.items():
            if recipe != DENSE:
                print(verdict(recipe, flat, two, found[DENSE][1]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
