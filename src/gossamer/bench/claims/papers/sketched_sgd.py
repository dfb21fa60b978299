"""Sketched-SGD: bytes that do not grow with ranks, and hardly with the model; and why there is a second round."""

import math

from gossamer.bench.claims import Contest, Evidence, Figure, PaperClaim, Statement, Study
from gossamer.bench.claims.convex import slope
from gossamer.bench.claims.sketches import needed, sent
from gossamer.bench.claims.verdict import Judgement, all_of, slope_within, within


def _constant(e: Evidence) -> Judgement:
    sketch = {s: b[-1] / b[0] for s, b in e.rows("ranks", "sketch", "bytes").items()}
    grows = {s: b[-1] / b[0] for s, b in e.rows("ranks", "top-k", "bytes").items()}
    return all_of({"sketch, 256 over 4 ranks": within(sketch, 0.99, 1.01), "top-k": within(grows, 2.0, math.inf)})


def _logarithmic(e: Evidence) -> Judgement:
    slopes = dict[int, float]()
    for seed, counts in e.rows("length", "sketch", "bytes").items():
        numel = e.rows("length", "sketch", "numel")[seed]
        slopes[seed] = slope([math.log(n) for n in numel], [math.log(c) for c in counts])
    return slope_within(slopes, -math.inf, 0.3)


def _second_round(e: Evidence) -> Judgement:
    """By seed, the accuracy that one round loses to dense, over what two lose (at least a tenth of a point)."""
    ends = {name: e.last("fashion", name, "quality") for name in e.cases("fashion")}
    lost = {
        s: (ends["dense"][s] - v) / max(ends["dense"][s] - ends["two rounds"][s], 1e-3)
        for s, v in ends["one round"].items()
    }
    return within({s: math.inf if math.isnan(v) else v for s, v in lost.items()}, 5.0, math.inf)


def _figures(e: Evidence) -> list[Figure]:
    ranks = [e.mean_line("ranks", c, "ranks", "bytes") for c in ("sketch", "top-k")]
    length = [e.mean_line("length", "sketch", "numel", "bytes")]
    return [
        Figure("ranks", "Bytes of a rank", "ranks", "bytes", True, True, ranks),
        Figure("length", "Bytes that find 20 heavy coordinates", "elements", "bytes", True, True, length),
    ]


SKETCH, TOPK = "sketched_sgd(ratio=0.005)", "gather(topk(0.005)) + error_feedback()"
CLAIM = PaperClaim(
    name="sketched_sgd",
    paper="Ivkin et al., Communication-efficient Distributed SGD with Sketching, NeurIPS 2019 (abstract and body read)",
    module=__name__,
    statements=(
        Statement(
            "a",
            "Up to 40 times less communication with no loss in model performance.",
            "gap <= 2 %",
            "not",
            waits="a long run: sketches begin too slowly for a short one",
        ),
        Statement(
            "b bytes",
            "It scales to at least 256 workers without increasing communication cost.",
            "bytes at 256 ranks within 1 % of those at 4, ring factor taken out; top-k's at least double",
            "holds",
            _constant,
        ),
        Statement(
            "b accuracy",
            "It scales to 256 workers without degrading performance.",
            "accuracy within 1 point",
            "holds",
            waits="runs of 256 ranks at equal total batch",
        ),
        Statement(
            "c",
            "Communication grows as the logarithm of the gradient's length.",
            "log-log slope of the bytes that find 20 heavy coordinates (95 % of their squared length) < .3, d = 2^12 to 2^18",
            "holds",
            _logarithmic,
        ),
        Statement(
            "d",
            "A second, exact round is needed.",
            "accuracy lost to dense: one round at least 5 times two rounds', or it diverges; all seeds",
            "holds",
            _second_round,
        ),
    ),
    setup=(
        "Bytes by the ledger of a dry run, on fashion's model, 4 to 256 ranks, a two-hundredth of the elements.",
        "Heavy-tailed gradients: half of the squared length in 20 coordinates, five rows, widths that grow by a quarter.",
        "fashion, four ranks, 156 steps, four trials each of 78 steps over the learning rate.",
    ),
    limits="Models of 90 million parameters, and a parameter server that sends updated weights down.",
    plan={
        "ranks": Study(sent, {"sketch": {"recipe": SKETCH}, "top-k": {"recipe": TOPK}}),
        "length": Study(needed, {"sketch": {"powers": [12, 13, 14, 15, 16, 17, 18]}}, quick={"powers": [10, 12]}),
        "fashion": Contest(
            "fashion",
            {"dense": "allreduce", "two rounds": SKETCH, "one round": "fetchsgd(ratio=0.005)"},
            steps=156,
            every=39,
            trials=4,
            tuned_steps=78,
        ),
    },
    methods=(
        "gossamer.bench.claims.sketches",
        "gossamer.codecs.count_sketch",
        "gossamer.codecs.topk",
        "gossamer.planning.bytes",
    ),
    figures=_figures,
)
