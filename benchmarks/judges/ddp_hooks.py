"""PyTorch's own judge of DDP's communication hooks, put to recipes: gradients that are known, within its tolerances.

python benchmarks/judges/ddp_hooks.py [RECIPE ...] [--ranks 4]

The figures are those of `_test_ddp_hook_parity` in torch/testing/_internal/distributed/distributed_test.py of PyTorch 2.13, where
`default.allreduce_hook`, `powerSGD_hook` of rank 1 and `post_localSGD_hook` must pass: `Linear(1, 5)`, one sample, which is the
rank's own number, and the sum of all outputs as the loss, 100 times. Each weight's gradient is then the mean of the ranks' numbers,
and the first must equal that and plain DDP's, as `torch.testing.assert_close` takes float32 to be equal: 1.3e-6 relative and 1e-5
absolute. Any recipe of agreed gradients may be given; tensors this small are sent in full by most.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gossamer

sys.path.insert(0, str(Path(__file__).parents[1]))
from ranks import start_ranks

STEPS, RELATIVE, ABSOLUTE = 100, 1.3e-6, 1e-5
MUST_PASS = ("allreduce", "powersgd(rank=1)", "scatter(fp32())")


def largest_error(recipe: str) -> float:
    """Of the first weight's gradient, in units of what is allowed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    hooked, plain = (DistributedDataParallel(nn.Linear(1, 5)) for _ in range(2))
    gossamer.ddp.register(hooked, recipe)
    sample, worst = torch.tensor([float(rank)]), 0.0
    expected = sum(range(size)) / size
    for _ in range(STEPS):
        for net in (hooked, plain):
            net.zero_grad()
            net(sample).sum().backward()
        found, theirs = (float(net.module.weight.grad[0, 0]) for net in (hooked, plain))
        for right in (expected, theirs):
            worst = max(worst, abs(found - right) / (ABSOLUTE + RELATIVE * abs(right)))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=MUST_PASS)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rank", action="store_true", help="set by the program itself")
    args = parser.parse_args()
    if not args.rank:
        sys.exit(start_ranks(args.ranks, port=29537))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    failed = False
    for recipe in args.recipes:
        worst = largest_error(recipe)
        failed |= worst > 1
        if dist.get_rank() == 0:
            print(
                f"{recipe:20} {'FAILS' if worst > 1 else 'passes'}, largest error {worst:.3g} of what is allowed",
                flush=True,
            )
    dist.barrier()
    sys.stdout.flush()
    os._exit(int(failed))


if __name__ == "__main__":
    main()
