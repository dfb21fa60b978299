"""Minibatch against local SGD where machines' data differ: the quadratic family of our documentation, in float64."""

from gossamer.bench.claims import Evidence, Figure, Line, PaperClaim, Statement, Study, mean
from gossamer.bench.claims.quadratics import ZETAS, measure
from gossamer.bench.claims.verdict import Judgement, all_of, apart, better, within

RULE = "F(x) = x'Lx/2; the best of 17 constant rates for each method and zeta; five seeds of noise"


def _at(evidence: Evidence, case: str, zeta: float) -> dict[int, float]:
    place = ZETAS.index(zeta)
    return {seed: row[place] for seed, row in evidence.rows("quadratic", case, "loss").items()}


def _spread(evidence: Evidence, case: str) -> Judgement:
    """How far the losses over all zeta lie apart, relative to the least."""
    rows = evidence.rows("quadratic", case, "loss")
    return within({s: (max(row) - min(row)) / min(row) for s, row in rows.items()}, 0.0, 1e-10)


def _first(evidence: Evidence) -> Judgement:
    return all_of({f"{m} K={k}": _spread(evidence, f"{m} {k}") for m in ("minibatch", "accelerated") for k in (10, 50)})


def _second(evidence: Evidence) -> Judgement:
    pairs = (("accelerated", "minibatch"), ("minibatch", "local"))
    gains = {
        f"{fast} below {slow}, K={k}, zeta={z:g}": better(
            apart(_at(evidence, f"{slow} {k}", z), _at(evidence, f"{fast} {k}", z))
        )
        for k in (10, 50)
        for z in (30.0, 100.0)
        for fast, slow in pairs
    }
    return all_of(gains)


def _third(evidence: Evidence) -> Judgement:
    others = ("minibatch", "accelerated")
    local = _at(evidence, "local 50", 1.0)
    return all_of({f"local below {m}": better(apart(_at(evidence, f"{m} 50", 1.0), local)) for m in others})


def _figures(evidence: Evidence) -> list[Figure]:
    names = ("minibatch", "accelerated", "local")
    lines = [Line(m, [[z, mean(_at(evidence, f"{m} 50", z))] for z in ZETAS if z]) for m in names]
    return [Figure("zeta", "Final loss after 20 rounds of 50 gradients", "zeta", "loss", True, True, lines)]


CASES = {
    f"{name} {k}": {"recipe": f"{recipe}({k})", "steps": 20 * k if name == "local" else 20, "curved": 0.9}
    for k in (10, 50)
    for name, recipe in (("minibatch", "minibatch"), ("accelerated", "accelerated"), ("local", "local_sgd"))
}
CLAIM = PaperClaim(
    name="woodworth",
    paper="Woodworth, Patel, Srebro, Minibatch vs Local SGD for Heterogeneous Distributed Learning, 2020 (abstract read)",
    module=__name__,
    statements=(
        Statement(
            "i",
            "Minibatch SGD, plain or accelerated, does not feel heterogeneity.",
            f"final losses for all zeta equal to 1e-10 of themselves. {RULE}",
            "holds",
            _first,
        ),
        Statement(
            "ii",
            "Accelerated minibatch SGD is best where heterogeneity is high.",
            "at zeta 30 and 100: accelerated < minibatch < local, all eight with bound",
            "holds",
            _second,
        ),
        Statement(
            "iii",
            "Local SGD improves over minibatch SGD in a regime that is not homogeneous.",
            "at zeta = 1 and K = 50: local < minibatch and local < accelerated, both with bound",
            "holds",
            _third,
        ),
        Statement(
            "control",
            "Where curvatures are equal, local SGD does not feel heterogeneity in gradients.",
            "final losses for all zeta equal to 1e-10 of themselves",
            "holds",
            lambda e: _spread(e, "local 10, equal curvatures"),
        ),
        Statement(
            "iv",
            "The same on logistic regression.",
            "ii and iii at spread >= 1 and < 1",
            "partly",
            waits="searches that judge the consensus, which accelerated needs",
        ),
    ),
    setup=(
        "Ten machines, each with its own quadratic of 50 dimensions; curvatures differ by h = .9, gradients by zeta.",
        "20 rounds of 10 or 50 gradients a machine, with noise; one average a round.",
        RULE + ".",
    ),
    limits="Optimality is a lower bound over all algorithms, and no run can show it. The abstract speaks of bounds, and what "
    "is run here is what they imply; the older bounds are not drawn, since their formulas were not at hand.",
    plan={
        "quadratic": Study(
            measure,
            {**CASES, "local 10, equal curvatures": {"recipe": "local_sgd(10)", "steps": 200, "curved": 0.0}},
            quick={"steps": 10},
        )
    },
    methods=(
        "gossamer.bench.claims.quadratics",
        "gossamer.schedules.accelerated",
        "gossamer.schedules.local_sgd",
        "gossamer.schedules.every_step",
    ),
    figures=_figures,
)
