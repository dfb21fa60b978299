"""EF21: a biased codec's error vanishes where error feedback's stays. Full gradients, float64."""

import math

from gossamer.bench.claims import Evidence, Figure, PaperClaim, Rows, Statement, Study
from gossamer.bench.claims.convex import crew, distances, ridge
from gossamer.bench.claims.verdict import Judgement, all_of, within

SPARSE = "gather(topk(ratio=0.1))"


def measure(seed: int, recipe: str, share: float, steps: int, every: int) -> Rows:
    """At a share of the inverse smoothness."""
    problem = ridge(seed)
    at, far, sent = distances(problem, crew(problem, recipe, share / problem.smooth), steps, every)
    return {"steps": at, "distance": far, "sent": sent}


def _judge(e: Evidence) -> Judgement:
    learned = within(e.last("ridge", "ef21", "distance"), 0, 1e-16)
    return all_of({"ef21": learned, "feedback": within(e.last("ridge", "feedback", "distance"), 1e-6, math.inf)})


def _figures(evidence: Evidence) -> list[Figure]:
    lines = [evidence.mean_line("ridge", c, "steps", "distance") for c in ("ef21", "feedback", "dense")]
    return [Figure("steps", "Squared distance to the optimum", "steps", "squared distance", False, True, lines)]


COMMON = {"share": 0.5, "steps": 1600, "every": 80}
CLAIM = PaperClaim(
    name="ef21",
    paper="Richtarik, Sokolov, Fatkhullin, EF21, NeurIPS 2021",
    module=__name__,
    statements=(
        Statement(
            "a",
            "EF21 converges to the optimum where error feedback stalls, on unlike data.",
            "squared distance <= 1e-16 under EF21 and >= 1e-6 under error feedback, all seeds",
            "holds",
            _judge,
        ),
    ),
    setup=(
        "Ridge regression, eight ranks with a source of their own each, full gradients, float64.",
        "The largest tenth of the elements, at half of the inverse smoothness; 1,600 steps.",
    ),
    limits="One convex problem. Stochastic gradients and networks are not tried.",
    plan={
        "ridge": Study(
            measure,
            {
                "ef21": {"recipe": f"{SPARSE} + ef21()", **COMMON},
                "feedback": {"recipe": f"{SPARSE} + error_feedback()", **COMMON},
                "dense": {"recipe": "allreduce", **COMMON},
            },
            quick={"steps": 60, "every": 20},
        )
    },
    methods=(
        "gossamer.bench.claims.convex",
        "gossamer.memories.ef21",
        "gossamer.memories.learning",
        "gossamer.memories.error_feedback",
        "gossamer.codecs.topk",
    ),
    figures=_figures,
)
