"""gossamer heterogeneity: measure how much the ranks' gradients differ."""

import json
from typing import Annotated

import typer
from torch import nn

from gossamer.bench.cli.compare import Shards, Workload
from gossamer.bench.cli.console import console
from gossamer.bench.cli.errors import InputError
from gossamer.bench.record import finite
from gossamer.bench.workloads import Workload as Trained
from gossamer.bench.workloads import get
from gossamer.fabrics.sim import simulate
from gossamer.runtime import Heterogeneity, gradients_of
from gossamer.runtime import heterogeneity as compared
from gossamer.simulate import replicas, train


def heterogeneity(
    workload: Workload = "lm",
    ranks: Annotated[int, typer.Option(min=2, max=4096, help="How many ranks the data are divided among.")] = 4,
    shards: Shards = "iid",
    micro_batches: Annotated[int, typer.Option(min=2, help="Batches per rank to measure with.")] = 8,
    at: Annotated[str, typer.Option(help="Measure after these steps of synchronous training.")] = "0",
    seed: int = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure how much the ranks' gradients differ: little favours local steps, much favours large batches.

    Nothing is started: virtual ranks train in this process. In a loop of your own, comm.heterogeneity(losses) tells it.
    """
    trained, steps = get(workload, seed=seed, shards=shards), _steps(at)
    trained.prepare()
    model = trained.model
    fleet = replicas("allreduce", model, trained.optimizer, ranks, seed)
    done, found = 0, dict[int, Heterogeneity]()
    for step in steps:
        train(fleet, lambda net, rank, number: _learn(trained, net, rank, number, ranks), step - done)
        done, net = step, fleet[0].model
        programs = [
            compared(gradients_of(_losses(trained, net, rank, ranks, done, micro_batches), [*net.parameters()]), ranks)
            for rank in range(ranks)
        ]
        found[step] = simulate(programs).results[0]
    if as_json:
        told = {str(n): each._asdict() | {"ratio": each.ratio, "advice": each.advice} for n, each in found.items()}
        print(json.dumps(finite(told), indent=1, allow_nan=False))
    else:
        _print(found)


def _steps(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 7 for word in words):
        raise InputError(f"--at takes steps such as '0' or '0,20,100', not {text!r}")
    return sorted({int(word) for word in words})


def _learn(trained: Trained, net: nn.Module, rank: int, step: int, ranks: int) -> float:
    loss = trained.loss(net, trained.batch(step - 1, rank, ranks))
    loss.backward()
    return float(loss.detach())


def _losses(trained: Trained, net: nn.Module, rank: int, ranks: int, done: int, count: int):
    for k in range(count):
        yield trained.loss(net, trained.batch(done + k, rank, ranks))


def _print(found: dict[int, Heterogeneity]) -> None:
    out = console()
    for step, seen in found.items():
        out.print(
            f"after {step} steps: the ranks' gradients lie {seen.ratio:.2f} lengths of the mean gradient from it "
            f"(zeta^2 {seen.unlike:.3g}, |mean|^2 {seen.gradient:.3g}, noise of a batch {seen.noise:.3g}, "
            f"diversity {seen.diversity:.2f})",
            markup=False,
            soft_wrap=True,
        )
    out.print(next(iter(found.values())).advice, markup=False, soft_wrap=True)
