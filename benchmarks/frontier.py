"""Newer methods beside what they are made from, at equal bytes: a table of docs/quality.md.

python benchmarks/frontier.py [NAME ...] [--steps 144] [--out runs/frontier.json]

Each pair trains `digits` on four virtual ranks. Both sides have six trials on seed 0, over rates and, where a method has a number
of its own, two of these; the best goes on, as it is, to seeds 1 and 2. A trial is judged by the held-out loss of the mean of the
ranks' models. What is done is kept after every run: the same command goes on where it was.
"""

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gossamer.bench.tune.training import Diverged, batches_of, parameters_of
from gossamer.bench.workloads import Workload, get
from gossamer.core import files
from gossamer.recipe import Recipe
from gossamer.simulate import bytes_per_step, replicas, train

KEPT = files.FileKind("record of a benchmark", ())

RANKS, TUNED_ON, JUDGED_ON = 4, 0, (1, 2)
LIAR = 3  # where a rank sends wrong gradients
Optimizer = Callable[[nn.Module, float], torch.optim.Optimizer]


class TwoOptimizers(torch.optim.Optimizer):
    """Two that step together, as one."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        both = [*first.param_groups, *second.param_groups]
        super().__init__([p for group in both for p in group["params"]], {})
        self.parts, self.param_groups = (first, second), both

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()


def momentum(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1 * rate, momentum=0.9)  # the workload's at a rate of 1


def plain(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1 * rate)


def adamw(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01 * rate)


def muon(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Muon for the hidden matrix, AdamW for vectors and the last layer."""
    hidden, *rest = model.parameters()
    return TwoOptimizers(torch.optim.Muon([hidden], lr=0.02 * rate), torch.optim.AdamW(rest, lr=0.01 * rate))


class Side(NamedTuple):
    """A recipe, in which {} stands for the numbers of its own."""

    recipe: str
    optimizer: Optimizer = momentum
    rates: tuple[float, ...] = tuple(2.0**k for k in range(-3, 3))
    numbers: tuple[float, ...] = ()

    def trials(self) -> Iterator[tuple[str, float]]:
        for number, rate in itertools.product(self.numbers or (0.0,), self.rates):
            yield self.recipe.format(number), rate


def outer(recipe: str, optimizer: Optimizer = momentum) -> Side:
    """With an outer rate of its own."""
    return Side(recipe, optimizer, (0.25, 1.0, 4.0), (0.7, 1.0))


@dataclass(frozen=True)
class Pair:
    method: Side
    base: Side
    lies: float = 1.0  # what rank 3's gradients are multiplied by


HONEST = Side("gather(fp32(), mean=clipped({}))", rates=(0.25, 1.0, 4.0), numbers=(0.5, 2.0))
SMALL = tuple(2.0**k for k in range(-9, -3))  # for steps that are as long in every element
LOW_RANK = "allreduce(powersgd(4, min_ratio=1.0)) + error_feedback()"
IN_TWO_BITS = "diloco(12, rate={}, momentum=0.5) + scatter(eden(2)) + error_feedback()"
SIGNS = Side("signsgd(momentum=0.9)", plain, SMALL)
PAIRS = {
    "sparta": Pair(Side("sparta(0.125)"), Side("local_sgd(8)")),
    "sparta in rounds": Pair(
        Side("allreduce(fp32()) + slowmo(24, beta=0.0, inner=sparta(0.0834))"), Side("local_sgd(8)")
    ),
    "clipped mean": Pair(HONEST, Side("gather(fp32())")),
    "clipped mean, a rank sends -4 times its gradient": Pair(HONEST, Side("gather(fp32())"), lies=-4.0),
    "async_diloco": Pair(outer("async_diloco(12, rate={}, momentum=0.5)"), outer("diloco(12, rate={}, momentum=0.5)")),
    "dion": Pair(Side("dion(4)", plain, tuple(2.0**k for k in range(-4, 2))), Side(LOW_RANK)),
    "distributed_lion": Pair(Side("distributed_lion", plain, SMALL), SIGNS),
    "distributed_lion, one bit": Pair(
        Side("scatter(sign('one'), feedback=0.0, own='encoded') + none(allow_biased=True) + lion()", plain, SMALL),
        SIGNS,
    ),
    "MuLoCo": Pair(outer(IN_TWO_BITS, muon), outer(IN_TWO_BITS, adamw)),
    "des_loc": Pair(Side("des_loc(12)", adamw), Side("local_sgd(8)", adamw)),
    "des_loc, beside Local Adam": Pair(
        Side("des_loc(12)", adamw), Side("allreduce(fp32()) + slowmo(24, beta=0.0, buffers='average')", adamw)
    ),
    "noloco": Pair(outer("noloco(12, rate={}, momentum=0.5)"), outer("diloco(18, rate={}, momentum=0.5)")),
    "edit": Pair(outer("edit(12, rate={}, momentum=0.5)"), outer("diloco(12, rate={}, momentum=0.5)")),
    "edit, a rank sends -4 times its gradient": Pair(
        outer("edit(12, rate={}, momentum=0.5)"), outer("diloco(12, rate={}, momentum=0.5)"), lies=-4.0
    ),
    "fp4": Pair(Side("scatter(fp4(block=32))"), Side("scatter(qsgd(bits=4, bucket=32))")),
}


def trained(side: Side, recipe: str, rate: float, seed: int, steps: int, lies: float) -> float:
    """The held-out loss of the mean of all ranks' models; infinite where training diverged."""
    workload = get("digits", seed=seed)
    crew = replicas(recipe, workload.model, lambda model: side.optimizer(model, rate), RANKS, seed)
    honest = batches_of(workload, RANKS)

    def backward(model: nn.Module, rank: int, step: int) -> float:
        loss = honest(model, rank, step)
        if rank == LIAR and lies != 1.0:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(lies)
        return loss

    try:
        train(crew, backward, steps)
    except Diverged:
        return math.inf
    loss = held_out(workload, torch.stack([replica.flat() for replica in crew]).mean(0))
    return loss if math.isfinite(loss) else math.inf


def held_out(workload: Workload, flat: Tensor) -> float:
    model = workload.model()
    nn.utils.vector_to_parameters(flat, model.parameters())
    with torch.no_grad():
        return float(workload.loss(model, workload.data.held))


class Kept:
    """All losses, by what gave them."""

    def __init__(self, path: Path, steps: int) -> None:
        self._path, self._steps = path, steps
        self._known: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}

    def loss(self, side: Side, recipe: str, rate: float, seed: int, lies: float) -> float:
        key = f"{recipe} | {side.optimizer.__name__} x {rate:g} | seed {seed} | {self._steps} steps | lies {lies:g}"
        if key not in self._known:
            self._known[key] = trained(side, recipe, rate, seed, self._steps, lies)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            files.write(self._path, json.dumps(self._known, indent=1) + "\n", KEPT, force=True)  # whole, or not at all
        return self._known[key]

    def best(self, side: Side, lies: float) -> tuple[str, float, list[float]]:
        """The best trial, and its losses on the seeds that judge."""
        recipe, rate = min(side.trials(), key=lambda trial: self.loss(side, *trial, TUNED_ON, lies))
        return recipe, rate, [self.loss(side, recipe, rate, seed, lies) for seed in JUDGED_ON]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[*PAIRS])
    parser.add_argument("--steps", type=int, default=144)
    parser.add_argument("--out", default="runs/frontier.json")
    asked = parser.parse_args()
    if unknown := [name for name in asked.names if name not in PAIRS]:
        parser.error(f"no pair {unknown[0]!r}; there are {', '.join(PAIRS)}")
    torch.set_num_threads(1)
    kept, parameters = Kept(Path(asked.out), asked.steps), parameters_of(get("digits").model())
    dense = bytes_per_step(Recipe.of("allreduce"), parameters, RANKS)
    print(
        "| method | as tuned | rate | bytes | held-out loss at seeds 1 and 2 | its base | rate | bytes | held-out loss |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in asked.names:
        row, pair = [name], PAIRS[name]
        for side in (pair.method, pair.base):
            recipe, rate, losses = kept.best(side, pair.lies)
            momenta = 2 if side.optimizer is adamw else 1
            sent = bytes_per_step(Recipe.of(recipe), parameters, RANKS, momenta=momenta)
            ends = ", ".join(f"{loss:.3f}" for loss in losses)
            row += [f"`{recipe}`", f"{rate:.2g}", f"1/{dense / sent:.3g}", f"{ends} ({fmean(losses):.3f})"]
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
