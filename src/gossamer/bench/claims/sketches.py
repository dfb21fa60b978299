"""What sketches send: by the number of ranks, and by the length of a gradient whose heavy coordinates are to be found."""

import math

import torch
from torch import Tensor

from gossamer.bench.claims.evidence import Rows
from gossamer.bench.workloads import get
from gossamer.codecs.count_sketch import CountSketch
from gossamer.core.bucket import Bucket
from gossamer.core.contracts import Context
from gossamer.core.rng import CounterRng
from gossamer.core.verbs import Program
from gossamer.fabrics.sim import simulate
from gossamer.planning import bytes_per_step

HEAVY, LEFT = 20, 0.05  # coordinates that hold half of a gradient's squared length; the share of them that may be lost
SIZES = (4, 16, 64, 256)


def sent(seed: int, recipe: str) -> Rows:
    """Bytes of a rank a step, without the ring's factor 2 (N - 1) / N, by the number of ranks."""
    shapes = dict(get("fashion", seed=seed).model().named_parameters())
    counts = [bytes_per_step(recipe, shapes, n) / (2 * (n - 1) / n) for n in SIZES]
    return {"ranks": [float(n) for n in SIZES], "bytes": counts}


def needed(seed: int, powers: list[int]) -> Rows:
    """The bytes with which the heavy coordinates are found, by the gradient's length."""
    return {"numel": [2.0**p for p in powers], "bytes": [_least(2**p, seed) for p in powers]}


def _least(numel: int, seed: int) -> float:
    """Of widths that grow by a quarter, the first at which at most `LEFT` of the heavy part is lost."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=rng) / math.sqrt(numel)
    places = torch.randperm(numel, generator=rng)[:HEAVY]
    x[places] = HEAVY**-0.5 * torch.randn(HEAVY, generator=rng).sign()
    columns = float(HEAVY)
    while columns < numel:
        lost, count = _lost(x, places, int(columns), seed)
        if lost <= LEFT:
            return count
        columns *= 1.25
    return math.nan


def _lost(x: Tensor, places: Tensor, columns: int, seed: int) -> tuple[float, float]:
    codec = CountSketch(HEAVY / x.numel(), columns=columns, candidates=2)

    def program() -> Program[Tensor]:
        result = yield from codec.average(Bucket.of({"w": x.clone()}), {}, Context(0, 1, 1, CounterRng(seed, 1, 0)))
        return result.mean.clone()

    found = simulate([program()]).results[0]
    return float((found - x)[places].square().sum() / x[places].square().sum()), 4.0 * (5 * columns + 2 * HEAVY)
