"""Stochastic Gradient Push: ranks that only gossip agree in the end."""

import torch
from torch import nn

from gossamer.bench.claims import Evidence, Figure, PaperClaim, Rows, Statement, Study
from gossamer.bench.claims.verdict import Judgement, all_of, within
from gossamer.bench.workloads import get
from gossamer.simulate import Replica, replicas, train

RANKS, ROUNDS = 8, 6  # and the rounds without learning: twice log2 of the ranks
LAST = 1e-3  # of the first learning rate, at the end of its decay


def measure(seed: int, recipe: str, steps: int, every: int) -> Rows:
    """How far the ranks' models are from their mean, while they learn from unlike data and afterwards."""
    task = get("ridge", seed=seed, shards="source")
    crew = replicas(recipe, task.model, task.optimizer, RANKS, seed)
    first = crew[0].optimizer.param_groups[0]["lr"]

    def backward(model: nn.Module, rank: int, step: int) -> float:
        crew[rank].optimizer.param_groups[0]["lr"] = first * LAST ** (step / steps) if step <= steps else 0.0
        loss = task.loss(model, task.batch(step - 1, rank, RANKS))
        loss.backward()
        return float(loss.detach())

    rows: Rows = {"steps": [], "apart": [], "after": []}
    for done in range(every, steps + 1, every):
        train(crew, backward, every)
        rows["steps"].append(done)
        rows["apart"].append(_apart(crew))
    train(crew, backward, ROUNDS)
    return {**rows, "after": [_apart(crew)]}


def _apart(crew: list[Replica]) -> float:
    models = torch.stack([r.flat() for r in crew])
    return float((models - models.mean(0)).norm(dim=1).max() / models.mean(0).norm())


def _consensus(e: Evidence) -> Judgement:
    decayed, exact = (within(e.last("ridge", "sgp", row), 0, bar) for row, bar in (("apart", 1e-3), ("after", 1e-6)))
    return all_of({"at the end of the decay": decayed, f"after {ROUNDS} rounds": exact})


def _figures(e: Evidence) -> list[Figure]:
    lines = [e.mean_line("ridge", c, "steps", "apart") for c in ("sgp", "sgp, one round late")]
    return [Figure("steps", "The rank that is furthest from the mean model", "step", "distance", False, True, lines)]


CLAIM = PaperClaim(
    name="sgp",
    paper="Assran, Loizou, Ballas, Rabbat, Stochastic Gradient Push for Distributed Deep Learning, 2019 (abstract read)",
    module=__name__,
    statements=(
        Statement(
            "a", "It converges at the rate of SGD.", "slopes of gradient norms", "holds", waits="runs of 16 ranks"
        ),
        Statement(
            "b",
            "All nodes achieve consensus.",
            "furthest rank below 1e-3 of the mean model at the end of the decay, below 1e-6 six rounds later; all seeds",
            "holds",
            _consensus,
        ),
        Statement(
            "c", "It is robust to stragglers and delays.", "ratios of step times", "holds", waits="an honest clock"
        ),
        Statement("d", "It takes a third of the time on 32 nodes.", "hours", "partly", waits="an honest clock"),
    ),
    setup=(
        "Ridge regression, eight ranks with a source of their own each, batches of 32, 400 steps.",
        "The learning rate falls to a thousandth, and then to zero for six rounds.",
    ),
    limits="Not ImageNet, and eight ranks. A form whose mass is not pushed, as a contrast, is not run.",
    plan={
        "ridge": Study(
            measure,
            {
                "sgp": {"recipe": "sgp", "steps": 400, "every": 20},
                "sgp, one round late": {"recipe": "osgp", "steps": 400, "every": 20},
            },
            quick={"steps": 40},
        )
    },
    methods=("gossamer.mixers.push_sum", "gossamer.schedules.gossip", "gossamer.topologies"),
    figures=_figures,
)
