"""Streaming DiLoCo: two orders of magnitude less bandwidth, by the planner."""

import math

from gossamer.bench.claims import Evidence, Figure, Line, PaperClaim, Statement, Study
from gossamer.bench.claims.clocks import BAND, TIMED
from gossamer.bench.claims.planned import METHODS, SCALES, busy_rates
from gossamer.bench.claims.verdict import Judgement, all_of, banded, within
from gossamer.planning.rates import BUSY

BARS = {"1B": 100.0, "10B": 200.0, "100B": 300.0}  # Gbit/s of data-parallel training for 95 %
TABLE = {  # its Table 4: Gbit/s for 50, 80, 90, 95 and 99 %
    "1B, data-parallel": (86.8, 152.6, 184.2, 222.3, 569.0),
    "1B, DiLoCo": (1.4, 6.2, 13.3, 23.3, 86.8),
    "1B, streaming": (1.4, 5.2, 9.1, 16.0, 28.1),
    "1B, overlapped": (1.4, 4.3, 6.2, 9.1, 11.0),
    "1B, 4 bits": (0.4, 0.9, 1.7, 2.0, 3.0),
    "10B, data-parallel": (104.8, 222.3, 222.3, 268.3, 471.5),
    "10B, DiLoCo": (1.7, 7.5, 16.0, 33.9, 104.8),
    "10B, streaming": (1.7, 5.2, 9.1, 13.3, 19.3),
    "10B, overlapped": (1.7, 3.6, 5.2, 6.2, 7.5),
    "10B, 4 bits": (0.4, 0.9, 1.4, 1.4, 1.7),
    "100B, data-parallel": (184.2, 323.8, 390.7, 390.7, 471.5),
    "100B, DiLoCo": (3.0, 11.0, 23.3, 49.4, 184.2),
    "100B, streaming": (2.4, 6.2, 9.1, 11.0, 19.3),
    "100B, overlapped": (1.7, 3.6, 4.3, 5.2, 5.2),
    "100B, 4 bits": (0.5, 0.9, 1.1, 1.1, 1.4),
}


def _at_95(e: Evidence, scale: str, method: str) -> float:
    return e.rows("rates", f"{scale}, {method}", "rate")[30][BUSY.index(0.95)]


def _orders(e: Evidence) -> Judgement:
    """By 90 times everywhere: holds, as for any factor; by more than once: partly."""

    def judged(dense: float, streamed: float) -> Judgement:
        found = {s: dense * _at_95(e, s, "data-parallel") / (streamed * _at_95(e, s, "4 bits")) for s in SCALES}
        verdict = "holds" if min(found.values()) >= 90 else "partly" if min(found.values()) > 1 else "not"
        return Judgement(verdict, ", ".join(f"{s} {ratio:.3g} times" for s, ratio in found.items()))

    return banded(judged(1.0, 1.0), judged(BAND[0], BAND[2]), judged(BAND[2], BAND[0]))


def _rates(e: Evidence) -> Judgement:
    def judged(stretch: float) -> Judgement:
        few = {f"{s}, 4 bits": within({30: stretch * _at_95(e, s, "4 bits")}, 0.0, 5.0) for s in SCALES}
        many = {s: within({30: stretch * _at_95(e, s, "data-parallel")}, BARS[s], math.inf) for s in SCALES}
        return all_of({**few, **{f"{s}, data-parallel": m for s, m in many.items()}})

    return banded(*(judged(stretch) for stretch in (1.0, BAND[0], BAND[2])))


def _table(e: Evidence) -> Judgement:
    apart = [
        ours / theirs
        for case, row in TABLE.items()
        for ours, theirs in zip(e.rows("rates", case, "rate")[30], row, strict=True)
    ]
    near = sum(0.5 <= a <= 2 for a in apart)
    verdict = "holds" if near >= 0.9 * len(apart) else "partly" if near >= 0.5 * len(apart) else "not"
    middle = sorted(apart)[len(apart) // 2]
    return Judgement(
        verdict, f"{near} of {len(apart)} rates within a factor of 2, ours {middle:.2f} times theirs in the median"
    )


def _figures(e: Evidence) -> list[Figure]:
    lines = list[Line]()
    for method in ("data-parallel", "DiLoCo", "4 bits"):
        case = f"1B, {method}"
        lines.append(e.mean_line("rates", case, "busy", "rate", f"{method}, ours"))
        lines.append(Line(f"{method}, the paper's", [[x, y] for x, y in zip(BUSY, TABLE[case], strict=True)]))
    title = "A billion parameters: the rate that keeps machines busy for a share of the time"
    return [Figure("rates", title, "share of the time", "Gbit/s", log_y=True, lines=lines)]


CLAIM = PaperClaim(
    name="streaming_diloco",
    paper="Douillard et al., Streaming DiLoCo with Overlapping Communication: Towards a Distributed Free Lunch, arXiv 2501.18512, "
    "2025. The whole paper.",
    module=__name__,
    statements=(
        Statement("a", "'reducing required bandwidth by two orders of magnitude'",
            "the rate for 95 % of data-parallel training is at least 90 times that of 4-bit streaming at 1B, 10B and 100B: holds; "
            "higher at all: partly", "partly", _orders),
        Statement("b", "'95% for models 1B, 10B, and 100B with a bandwidth roughly constant between 1 and 5 Gbit/s. Data-Parallel on "
            "the other hand requires 100, 200, and 300Gbit/s'",
            "4-bit streaming needs at most 5 Gbit/s for 95 %, data-parallel training at least 100, 200 and 300", "holds", _rates),
        Statement("c", "Which rates keep machines busy for 50 to 99 % of the time: 75 simulated rates (Table 4).",
            "ours within a factor of 2: nine tenths of them: holds; half: partly", "holds", _table),
        Statement("d", "'reach similar quality as before'", "4-bit streaming against DiLoCo at equal tokens", "partly",
            waits="a training long enough for DiLoCo's outer momentum"),
    ),
    setup=("The planner: two replicas, steps of .1, .8 and 4.9 s, fragments of three layers, links and processors that cost their bytes "
           "alone.",
           "Rounds of 96, 96 and 108 steps in place of 100, so that fragments come at equal distances; fragments land a step late.",
           "Data-parallel training, DiLoCo and the first two streaming forms send 16 bits a number, the last 4 bits and scales."),
    limits="A simulation beside a simulation: nobody here has two sites. A plan has no dice, so one seed is all; what was expected "
    "was written before the first plan. Quality is another statement, and waits.",
    plan={
        "rates": Study(busy_rates, {f"{s}, {m}": {"scale": s, "method": m} for s in SCALES for m in ("data-parallel", *METHODS)},
            seeds=(30,)),
    },
    methods=("gossamer.schedules.streaming", "gossamer.planning.rates", "gossamer.planning.baselines", *TIMED),
    figures=_figures,
)  # fmt: skip
