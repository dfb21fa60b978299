"""PyTorch's own judge of DDP's communication hooks, put to recipes: gradients that are known, within its tolerances.

python benchmarks/judges/ddp_hooks.py [RECIPE ...] [--ranks 2]

The figures are those of `_test_ddp_hook_parity` in torch/testing/_internal/distributed/distributed_test.py of PyTorch 2.13, where
`default.allreduce_hook`, `powerSGD_hook` of rank 1 and `post_localSGD_hook` must pass: `Linear(1, 5)`, one sample, which is the
rank's own number, and the sum of all outputs as the loss, 100 times. Each weight's gradient is then the mean of the ranks' numbers,
and the first must equal that and plain DDP's, as `torch.testing.assert_close` takes float32 to be equal: 1.3e-6 relative and 1e-5
absolute. Any recipe of agreed gradients may be given; tensors this small are sent in full by most.

And those of `DistributedDataParallelCommHookTest` in test/distributed/algorithms/ddp_comm_hooks/test_ddp_hooks.py (pytorch/pytorch
at 0a39f24b): a parameter of 40 by 20, of which the gradient on rank r is x to the power of 1 + r over 800, x from seed 2020. Beside
DDP's gradient an all-reduce in full may err by 1e-5 relative, and what is sent in 16 bits, or quantised to 8 bits, by 1e-4
absolute besides. There two GPUs do it, and hooks quantise on GPUs only; here any number of ranks, on gloo.
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
POWERS = {  # recipe: what it may err by, relative and absolute, and whose hook may
    "allreduce(fp32())": (1e-5, 0.0, "allreduce"),
    "allreduce(fp16())": (1e-5, 1e-4, "fp16_compress"),
    "scatter(fp16())": (1e-5, 1e-4, "fp16_compress"),
    "scatter(int8())": (1e-5, 1e-4, "quantization_perchannel"),
    "scatter(qsgd(bits=8))": (1e-5, 1e-4, "quantization_pertensor"),
}


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


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(40, 20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def error_of_powers(recipe: str, allowed: tuple[float, float] | None = None) -> float:
    """The largest of a gradient of powers beside DDP's, in units of what is allowed, or what a hook of the kind may err by."""
    hooked, plain = (DistributedDataParallel(Scaled()) for _ in range(2))
    gossamer.ddp.register(hooked, recipe)
    sample = torch.randn(40, 20, generator=torch.Generator().manual_seed(2020))
    for net in (hooked, plain):
        net(sample ** (1 + dist.get_rank())).mean().backward()
    found, right = (net.module.weight.grad for net in (hooked, plain))
    relative, absolute = allowed or POWERS[recipe][:2]
    return float(((found - right).abs() / (absolute + relative * right.abs()).clamp(min=1e-30)).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=MUST_PASS)
    parser.add_argument("--ranks", type=int, default=2)
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
    for recipe, (relative, absolute, hook) in POWERS.items() if args.recipes == MUST_PASS else ():
        worst = error_of_powers(recipe)
        failed |= worst > 1
        if dist.get_rank() == 0:
            print(
                f"{recipe:21} {'FAILS' if worst > 1 else 'passes'}, powers: {worst:.3g} of {relative:.0e} relative and {absolute:.0e} "
                f"absolute, which {hook}_hook may err by",
                flush=True,
            )
    dist.barrier()
    sys.stdout.flush()
    os._exit(int(failed))


if __name__ == "__main__":
    main()
