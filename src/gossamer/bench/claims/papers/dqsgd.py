"""DQ-SGD: bits a step that make the final error least, on noisy quadratics in float64."""

from gossamer.bench.claims import Evidence, Figure, PaperClaim, Statement, Study, mean
from gossamer.bench.claims.evidence import Line
from gossamer.bench.claims.quantised import allocation, trained
from gossamer.bench.claims.verdict import Judgement, all_of, apart, better, ratios, within

KINDS, SHAPES = ("fixed", "dynamic", "reversed"), {"isotropic": 0.0, "spread": 0.5}


def _error(e: Evidence, kind: str, shape: str, row: str = "error") -> dict[int, float]:
    return e.last("quadratic", f"{kind}, {shape}", row)


def _optimal(e: Evidence) -> Judgement:
    return within({s: max(row) for s, row in e.rows("allocation", "random", "above").items()}, -1e-5, 1e-3)


def _tight(e: Evidence) -> Judgement:
    found = {
        f"{k}, {shape}": ratios(_error(e, k, shape, "bound"), _error(e, k, shape)) for k in KINDS for shape in SHAPES
    }
    return all_of({case: within(r, 1.0, 1.5 if "isotropic" in case else 1e9) for case, r in found.items()})


def _dynamic(e: Evidence) -> Judgement:
    fixed = {shape: _error(e, "fixed", shape) for shape in SHAPES}
    gains = {f"dynamic, {s}": better(apart(fixed[s], _error(e, "dynamic", s)), "of loss") for s in SHAPES}
    return all_of(gains | {f"not reversed, {s}": better(apart(_error(e, "reversed", s), fixed[s])) for s in SHAPES})


def _figures(e: Evidence) -> list[Figure]:
    bars = [Line(k, [[SHAPES[s], mean(_error(e, k, s))] for s in SHAPES]) for k in KINDS]
    rows = {k: next(iter(e.rows("quadratic", f"{k}, spread", "bits").values())) for k in KINDS}
    bits = [Line(k, [[float(t), b] for t, b in enumerate(row)][:: max(1, len(row) // 30)]) for k, row in rows.items()]
    return [
        Figure("error", "Final loss at equal bits", "log-spread of the curvatures", "loss", False, True, bars),
        Figure("bits", "Bits of an element", "step", "bits", lines=bits),
    ]


CASES = {
    f"{kind}, {shape}": {"bits": kind, "mean_bits": 3.0, "spread": spread, "steps": 300}
    for kind in KINDS
    for shape, spread in SHAPES.items()
}
CLAIM = PaperClaim(
    name="dqsgd",
    paper="Yan, Huang, Lan, Song, DQ-SGD: Dynamic Quantization in SGD, 2021 (abstract read)",
    module=__name__,
    statements=(
        Statement(
            "a optimal",
            "Bits are chosen by minimising the communication cost under a constraint on the error.",
            "noise within .1 % of the least, by duality, for 20 random demands a seed",
            "holds",
            _optimal,
        ),
        Statement(
            "a tight",
            "Its bound of the error is tight in some cases.",
            "bound over observed error in [1, 1.5] on the isotropic quadratic, at least 1 on the other; all seeds",
            "holds",
            _tight,
        ),
        Statement(
            "a gain",
            "At equal bits the final error is less than with fixed bits, and reversed bits are worse.",
            "fixed less dynamic, and reversed less fixed: better, on both quadratics",
            "holds",
            _dynamic,
        ),
    ),
    setup=(
        "Quadratics in 64 dimensions with noisy gradients, isotropic, and with curvatures a factor e apart.",
        "300 steps at 3 bits an element on average; 200 runs a seed, their mean.",
    ),
    limits="The other methods of the paper, and its tables. Networks are a claim of their own.",
    plan={
        "allocation": Study(allocation, {"random": {"steps": 60}}, quick={"steps": 12}),
        "quadratic": Study(trained, CASES, quick={"steps": 60}),
    },
    methods=("gossamer.bench.claims.quantised", "gossamer.controllers.allocation"),
    figures=_figures,
)
