"""CHOCO: gossip with compressed differences reaches consensus, at a linear rate."""

import math

import torch
from torch import Tensor, nn

from gossamer.bench.claims import Evidence, Figure, PaperClaim, Rows, Statement, Study
from gossamer.bench.claims.convex import slope
from gossamer.bench.claims.verdict import Judgement, all_of, slope_within, within
from gossamer.simulate import replicas, train

RANKS, WIDE = 8, 64


def measure(seed: int, recipe: str, steps: int, every: int) -> Rows:
    """Ranks that begin with models of their own, learn nothing, and talk: how far are they from their mean?"""
    crew = replicas(recipe, _model, lambda model: torch.optim.SGD(model.parameters(), lr=0.0), RANKS, seed)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for r in crew:
            r.model.get_parameter("weight").copy_(torch.randn(1, WIDE, generator=rng, dtype=torch.float64))
    start = torch.stack([r.flat() for r in crew])
    mean, whole = start.mean(0), float((start - start.mean(0)).square().sum())
    rows: Rows = {"steps": [0.0], "distance": [1.0], "drift": [0.0]}
    while rows["steps"][-1] < steps:
        train(crew, _nothing, every)
        now = torch.stack([r.flat() for r in crew])
        rows["steps"].append(rows["steps"][-1] + every)
        rows["distance"].append(float((now - mean).square().sum()) / whole)
        rows["drift"].append(_length(now.mean(0) - mean) / _length(mean))
    return rows


def _length(x: Tensor) -> float:
    return float(x.norm())


def _model() -> nn.Module:
    return nn.Linear(WIDE, 1, bias=False, dtype=torch.float64)


def _nothing(model: nn.Module, rank: int, step: int) -> float:
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return 0.0


def _judge(e: Evidence) -> Judgement:
    near = within(e.last("gossip", "compressed", "distance"), 0, 1e-12)
    slopes = dict[int, float]()
    for seed, far in e.rows("gossip", "compressed", "distance").items():
        steps = e.rows("gossip", "compressed", "steps")[seed]
        kept = [(s, math.log10(d)) for s, d in zip(steps, far, strict=True) if d > 1e-20]
        halves = kept[: len(kept) // 2], kept[len(kept) // 2 :]
        first, second = (slope(*map(list, zip(*half, strict=True))) for half in halves)
        slopes[seed] = second / first  # of a linear rate, both halves fall alike
    return all_of({"consensus": near, "second half's rate over the first's": slope_within(slopes, 0.7, 1.4)})


def _figures(e: Evidence) -> list[Figure]:
    lines = [e.mean_line("gossip", c, "steps", "distance") for c in ("compressed", "whole")]
    return [
        Figure(
            "steps", "Distance from the mean, of that at the start", "rounds", "squared distance", False, True, lines
        )
    ]


COMMON = {"steps": 120, "every": 6}
CLAIM = PaperClaim(
    name="choco",
    paper="Koloskova, Stich, Jaggi, Decentralized Stochastic Optimization and Gossip with Compressed Communication, ICML 2019",
    module=__name__,
    statements=(
        Statement(
            "a",
            "Compressed gossip reaches consensus on the mean at a linear rate.",
            "squared distance <= 1e-12 of the start's, all seeds; log-slopes of both halves within a factor of 1.4, interval",
            "holds",
            _judge,
        ),
    ),
    setup=(
        "Eight ranks on a ring, each with 64 numbers of its own, no learning; four bits an element.",
        "120 rounds, and beside it gossip of whole models.",
    ),
    limits="Consensus alone: its optimisation with gradients is not tried.",
    plan={
        "gossip": Study(
            measure,
            {"compressed": {"recipe": "choco_sgd", **COMMON}, "whole": {"recipe": "choco_sgd(fp32())", **COMMON}},
            quick={"steps": 24},
        )
    },
    methods=("gossamer.bench.claims.convex", "gossamer.mixers.choco", "gossamer.codecs.qsgd", "gossamer.topologies"),
    figures=_figures,
)
