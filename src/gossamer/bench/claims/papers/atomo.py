"""ATOMO: the probabilities of keeping atoms that make the variance least. Real gradients."""

import math

from gossamer.bench.claims import DEAR, Evidence, PaperClaim, Statement, Study
from gossamer.bench.claims.atoms import measure
from gossamer.bench.claims.verdict import Judgement, all_of, within


def _all(e: Evidence, row: str, low: float, high: float) -> dict[str, Judgement]:
    """The worst value of a row, by seed, for each case."""
    found = dict[str, Judgement]()
    for case in e.cases("gradients"):
        rows = e.rows("gradients", case, row)
        found[case] = within({s: max(v, key=abs, default=math.nan) for s, v in rows.items()}, low, high)
    return found


def _a(e: Evidence) -> Judgement:
    asked = (
        ("duality gap", "gap", -1e-6, 1e-6),
        ("budget", "spent", 1 - 1e-6, 1 + 1e-6),
        ("variance to others", "ratio", 0, 1 + 1e-9),
    )
    return all_of(
        {f"{name}, {case}": j for name, row, low, high in asked for case, j in _all(e, row, low, high).items()}
    )


CASES = {
    f"{workload}, step {steps}, {'singular values' if spectral else 'entries'}": {
        "workload": workload,
        "steps": steps,
        "share": 0.1 if spectral else 0.01,
        "spectral": spectral,
    }
    for workload in ("fashion", "lm")
    for steps in (1, 50)
    for spectral in (False, True)
}
CLAIM = PaperClaim(
    name="atomo",
    paper="Wang et al., ATOMO: Communication-efficient Learning via Atomic Sparsification, NeurIPS 2018 (abstract read)",
    module=__name__,
    statements=(
        Statement(
            "a",
            "Given atoms and a budget, it gives a random unbiased sparsification of the least variance.",
            "duality gap <= 1e-6 of the optimum, budget spent to 1e-6, variance <= three other unbiased choices'; "
            "all gradients and seeds",
            "holds",
            _a,
        ),
        Statement(
            "a unbiased",
            "Each atom is kept as often as its probability says.",
            "the largest z-score of 500 draws, over sqrt(2 ln n), at most 2; all gradients and seeds",
            "holds",
            lambda e: all_of(_all(e, "z", 0, 2.0)),
        ),
        Statement(
            "b",
            "TernGrad and QSGD of one level are special cases.",
            "probabilities equal to 1e-12 at their budgets; all gradients and seeds",
            "holds",
            lambda e: all_of(_all(e, "special", 0, 1e-12)),
        ),
        Statement(
            "c1",
            "Singular values are better per byte than coordinates.",
            "held-out loss at equal bytes",
            "partly",
            waits="training runs, which are dear: an SVD at each step",
        ),
        Statement("c2", "Training with them is faster.", "time to TernGrad's loss", "partly", waits="an honest clock"),
    ),
    setup=(
        "The largest matrix of a gradient of fashion and of lm, after 1 and 50 steps on one rank.",
        "Entries with a budget of 1 % of their number, singular values with 10 %; three judged seeds.",
        "Others: uniform, w^2 and sqrt(w), each at most one and with the same budget.",
    ),
    limits="A variance is no training run, nor is an optimum per atom one per byte.",
    plan={"gradients": Study(measure, CASES, quick={"steps": 1}, seeds=DEAR)},
    methods=("gossamer.bench.claims.atoms", "gossamer.codecs.waterfill", "gossamer.bench.noise"),
)
