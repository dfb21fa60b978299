"""Check recipes: every preset trains a small model; ranks and transports must give equal results."""

import threading
import warnings
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from inspect import signature
from math import isfinite
from statistics import fmean
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

import gossamer
from gossamer.bench.catalogue import example
from gossamer.bench.compare.gpu.check_spec import WAYS, CheckSpec, Path, Placement
from gossamer.bench.compare.gpu.findings import Finding
from gossamer.core.binding import Binding
from gossamer.core.bucket import Layout
from gossamer.core.errors import AttachError, RecipeError
from gossamer.core.hashes import hash_of
from gossamer.integrations import Communicator
from gossamer.integrations.checks.devices import refuse_lengths
from gossamer.recipe import Recipe
from gossamer.recipes import presets

SHORT = {"epoch": 4, "every": 2, "freeze": 4, "steps": 8, "warmup": 4}  # so short that a few steps cover them
BATCHES, BATCH, INPUTS = 64, 8, 32
CLOSE = 0.01  # relative difference allowed between mean losses: sums in another order round differently
MOST_WAITS = 2  # of the host for the GPU in a step: one for the finite check of the mean, one more in some recipes
WARMING = 2  # steps in which kernels are compiled
SETTLED = 7  # steps after which every phase of the short periods has been seen, and its tables are on the GPU
# Whose comm threads wait all the same, and why.
LANES_WAIT = {
    "gradiveq": "torch's SVD asks the GPU whether it converged",
    "auto": "each recipe it tries makes its tables",
}
WARNS = "called a synchronizing CUDA operation"  # as torch does in its debug mode


def check(spec: CheckSpec, placement: Placement, subject: str) -> Finding:
    sizes, device = spec.sizes, placement.device
    torch.manual_seed(0)
    model = net(sizes.width).to(device)
    recipe = short(subject)
    own = any("sends momentum" in part.traits for part in recipe.parts())
    own |= recipe.update is not None and (recipe.update.is_step or "fades" in recipe.memory.traits)
    own |= "own step" in recipe.schedule.traits
    adam = recipe.update is not None and recipe.update.is_step  # its steps are as long as lr, whatever the gradients
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4 if adam else 0.01, momentum=0.0 if own else 0.9)
    batches = batches_of(placement.rank).to(device)
    losses, warm, settled = list[Tensor](), 0, 0  # and from which steps on waits are counted
    with gossamer.attach(model, optimizer, short(subject), deadline=sizes.deadline) as comm:
        with host_waits(device) as waits:
            while comm.step < sizes.steps:  # which jumps where a late rank catches up
                if not warm and comm.step >= WARMING:
                    warm = comm.step
                    waits.clear()
                if not settled and comm.step >= SETTLED:
                    settled = comm.step
                    waits["lane"] = 0
                losses.append(step(model, optimizer, comm, batches))
            done = comm.step
        comm.check_sync()
        with comm.consensus():
            agreed = reduce(lambda sofar, p: crc32(b"%d" % hash_of(p), sofar), model.parameters(), 0)
    told = torch.stack(losses).cpu().tolist()
    numbers: dict[str, Any] = {
        "losses": told,
        "hash": agreed,
        "waits": waits["loop"] / (done - warm) if warm else 0.0,
        "lane_waits": waits["lane"] / (done - settled) if settled else 0.0,
    }
    wrong = _wrong(numbers, spec.path, subject in LANES_WAIT or recipe.schedule.shape.is_async)
    says = wrong or ("" if spec.path == "cpu" else f"the host waits {numbers['waits']:.1f} times a step")
    return Finding(spec.title, subject, "failed" if wrong else "passed", says, numbers)


def _wrong(numbers: Mapping[str, Any], way: Path, lanes_wait: bool) -> str:
    """What is wrong in the numbers of one rank; empty if nothing. Who answers whoever is first goes by way of the host."""
    if not all(map(isfinite, numbers["losses"])):
        return f"its losses are not finite: {_few(numbers['losses'])}"
    if numbers["waits"] > MOST_WAITS:
        return f"the host waits for the GPU {numbers['waits']:.1f} times a step"
    if way == "nccl" and numbers["lane_waits"] and not lanes_wait:
        return f"a comm thread waits for the GPU {numbers['lane_waits']:.1f} times a step"
    return ""


def short(preset: str) -> Recipe:
    """A preset with short rounds and epochs."""
    make = presets()[preset]
    given = {n: SHORT[n] for n, p in signature(make).parameters.items() if p.default is p.empty}
    return make(**given) if given else example(preset)


def refused(preset: str, size: int) -> str:
    """Why a preset does not run on so many GPUs; empty if it does."""
    try:
        refuse_lengths(short(preset), torch.device("cuda"))
        short(preset).fits(Binding(size, [Layout.of({"w": (64, 64)})]))
    except (AttachError, RecipeError) as error:
        return str(error)
    return ""


def waits_for_few(preset: str) -> bool:
    return "waits for few" in short(preset).schedule.traits


def net(width: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(INPUTS, width)]
    for _ in range(4):
        layers += [nn.ReLU(), nn.Linear(width, width)]
    return nn.Sequential(*layers)


def batches_of(rank: int) -> Tensor:
    return torch.randn(BATCHES, BATCH, INPUTS, generator=torch.Generator().manual_seed(rank), dtype=torch.float32)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator, batches: Tensor) -> Tensor:
    """One optimizer step of an ordinary loop, which never waits for the GPU by itself."""
    optimizer.zero_grad()
    last, loss, micro = False, batches, 0
    while not last:
        with comm.accumulating() as last:
            loss = model(batches[(7 * comm.step + micro) % BATCHES]).square().mean()
            (loss / comm.accumulate).backward()
        micro += 1
    optimizer.step()
    return loss.detach()


@contextmanager
def host_waits(device: torch.device) -> Generator[Counter[str]]:
    """Count how often the "loop" and a "lane" (comm thread) wait for the GPU, as far as torch reports it."""
    seen = Counter[str]()
    if device.type != "cuda":
        yield seen
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=WARNS)
        others = warnings.showwarning

        def count(message: Warning | str, *rest: Any, **more: Any) -> None:
            if str(message).startswith(WARNS):
                seen["lane" if threading.current_thread().name.startswith("gossamer-") else "loop"] += 1
            else:
                others(message, *rest, **more)

        warnings.showwarning = count
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode("default")


def compared(subject: str, ways: Mapping[Path, Mapping[int, Finding]]) -> Finding:
    """Compare one preset between ranks and transports: replicas must be equal, mean losses close."""
    for way, by_rank in ways.items():
        hashes = {rank: f.numbers["hash"] for rank, f in by_rank.items()}
        if len(set(hashes.values())) > 1:
            return _failed(subject, f"the model that all ranks agree on differs between them over {WAYS[way]}")
    if waits_for_few(subject):
        return Finding("mean losses", subject, "left out", "it waits for the first ranks, which differ between runs")
    means = {way: [fmean(at) for at in zip(*(f.numbers["losses"] for f in by.values()))] for way, by in ways.items()}
    (first, reference), *others = means.items()
    farthest = 0.0
    for way, losses in others:
        gap = max(abs(a - b) / max(abs(a), 1e-9) for a, b in zip(reference, losses))
        farthest = max(farthest, gap)
        if gap > CLOSE or len(losses) != len(reference):
            return _failed(
                subject, f"over {WAYS[way]} they are {_few(losses)}, and over {WAYS[first]} {_few(reference)}"
            )
    says = f"{', '.join(WAYS[way] for way in means)}: at most {farthest:.1e} apart"
    return Finding("mean losses", subject, "passed", says, {WAYS[way]: losses for way, losses in means.items()})


def _failed(subject: str, says: str) -> Finding:
    return Finding("mean losses", subject, "failed", says)


def _few(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.5g}" for loss in losses)
