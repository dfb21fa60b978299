"""DIANA on ridge regression: its runs, and what is read from them."""

import math

from gossamer.bench.claims.convex import crew, distances, ridge, slope, sparse_optimum
from gossamer.bench.claims.evidence import Evidence, Rows
from gossamer.bench.claims.verdict import Judgement, all_of, apart, better, ratios, slope_within, within
from gossamer.memories.diana import plan

L1 = 0.05
NEAR = 1e-10  # the squared distance to which steps and bits are counted


def measure(seed: int, recipe: str, norm: str, block: int, steps: int, every: int) -> Rows:
    """At the theory's step size; with bytes, and the complexity that the theory promises."""
    problem = ridge(seed)
    theory = plan(problem.smooth, problem.convex, 8, block, "l2" if norm == "l2" else "max")
    lr = 2 / (problem.smooth + problem.convex) if norm == "none" else theory.gamma
    ranks = crew(problem, recipe, lr)
    goal = sparse_optimum(problem, L1) if "l1=" in recipe else None
    at, apart_, sent = distances(problem, ranks, steps, every, goal)
    found = ranks[0].flat()
    support = 0.0 if goal is None else float(((found != 0) != (goal != 0)).sum())
    return {"steps": at, "distance": apart_, "sent": sent, "complexity": [theory.complexity], "misplaced": [support]}


def slowed(seed: int, recipe: str, steps: int, every: int) -> Rows:
    """At the rate 2 / (mu (t + 4 L / mu)), which falls as 1 / t."""
    problem = ridge(seed)
    late = 4 * problem.smooth / problem.convex
    ranks = crew(problem, recipe, 1 / problem.smooth)
    at, apart_, _ = distances(problem, ranks, steps, every, rate=lambda t: 2 / (problem.convex * (t + late)))
    return {"steps": at, "distance": apart_}


def reached(evidence: Evidence, case: str, row: str) -> dict[int, float]:
    """By seed, the steps or bytes after which the distance is below `NEAR`; not a number if it never is."""
    far, count = evidence.rows("ridge", case, "distance"), evidence.rows("ridge", case, row)
    return {s: next((c for d, c in zip(far[s], count[s], strict=True) if d <= NEAR), math.nan) for s in far}


def linear(evidence: Evidence, case: str) -> dict[int, float]:
    """By seed, how many times as fast as the theory the logarithm of the distance falls, until rounding stops it."""
    found = dict[int, float]()
    for seed, far in evidence.rows("ridge", case, "distance").items():
        steps = evidence.rows("ridge", case, "steps")[seed]
        kept = [(s, math.log(d)) for s, d in zip(steps, far, strict=True) if d > 1e-24]
        found[seed] = -slope(*map(list, zip(*kept, strict=True))) * evidence.first("ridge", case, "complexity")[seed]
    return found


def falls(evidence: Evidence) -> Judgement:
    slopes = dict[int, float]()
    for seed, far in evidence.rows("slowed", "ternary", "distance").items():
        steps = evidence.rows("slowed", "ternary", "steps")[seed]
        late = [(math.log(s), math.log(d)) for s, d in zip(steps, far, strict=True) if s >= steps[-1] / 5]
        slopes[seed] = slope(*map(list, zip(*late, strict=True)))
    return slope_within(slopes, -1.2, -0.8)


def ends(evidence: Evidence, case: str, low: float, high: float) -> Judgement:
    return within(evidence.last("ridge", case, "distance"), low, high)


def with_and_without(e: Evidence) -> Judgement:
    near = {f"{c} with memory": ends(e, f"{c} diana", 0, 1e-20) for c in ("ternary", "qsgd", "l2")}
    return all_of({**near, **{f"{c} without": ends(e, c, 1e-6, math.inf) for c in ("ternary", "qsgd", "l2")}})


def sparse_too(e: Evidence) -> Judgement:
    exact = within(e.last("ridge", "l1 diana", "misplaced"), 0, 0)
    return all_of(
        {
            "with memory": ends(e, "l1 diana", 0, 1e-18),
            "its support": exact,
            "without": ends(e, "l1", 1e-17, math.inf),
        }
    )


def as_fast(e: Evidence) -> Judgement:
    return all_of({c: within(linear(e, f"{c} diana"), 1.0, math.inf) for c in ("ternary", "qsgd", "l2")})


def fewer_bits(e: Evidence) -> Judgement:
    times = ratios(reached(e, "dense", "sent"), reached(e, "qsgd diana", "sent"))
    return better({seed: ratio - 1 for seed, ratio in times.items()})


def fewer_steps(e: Evidence) -> Judgement:
    return better(apart(reached(e, "l2 diana", "steps"), reached(e, "qsgd diana", "steps")))
