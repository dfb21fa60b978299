"""Decoupled DiLoCo: learners that fail do not stop the others."""

from gossamer.bench.claims import DEAR, Evidence, Figure, Line, PaperClaim, Statement, Study, mean
from gossamer.bench.claims.clocks import TIMED
from gossamer.bench.claims.failing import going_on, starting_again
from gossamer.bench.claims.verdict import Judgement, all_of, at_least, at_most, banded, within

LEARNERS, ROUND = 8, 24
BETWEEN = (100.0, 198.0, 400.0)  # steps from one failure of any learner to the next
CHOSEN = 198.0  # where restarts are planned to keep .58 of the time


def _at(e: Evidence, case: str, row: str, place: int) -> dict[int, float]:
    study = "failures" if case.startswith("going on") else "restarts"
    return {seed: values[place] for seed, values in e.rows(study, case, row).items()}


def _goodput(e: Evidence) -> Judgement:
    def judged(place: int) -> Judgement:
        restarts = _at(e, f"starting again, {CHOSEN:g}", "goodput", 0)
        kept = at_least(_at(e, f"going on, {CHOSEN:g}", "goodput", place), 0.88)
        return all_of({"decoupled": kept, "restarts": at_most(restarts, 0.7)})

    return banded(judged(1), judged(0), judged(2))


def _never_still(e: Evidence) -> Judgement:
    ends = [
        within(_at(e, f"going on, {b:g}", "still", place), 0.0, 1.0, "steps") for b in BETWEEN for place in range(3)
    ]
    return all_of(
        {f"every {b:g} steps, band {i + 1}": ends[3 * n + i] for n, b in enumerate(BETWEEN) for i in range(3)}
    )


def _figures(e: Evidence) -> list[Figure]:
    lines = [
        Line(name, [[b, mean(_at(e, f"{name}, {b:g}", "goodput", place))] for b in BETWEEN])
        for name, place in (("going on", 1), ("starting again", 0))
    ]
    title = "Share of the time that becomes steps, eight learners"
    return [Figure("goodput", title, "steps from one failure to the next", "share", log_x=True, lines=lines)]


CLAIM = PaperClaim(
    name="decoupled_diloco",
    paper="Douillard et al., Decoupled DiLoCo for Resilient Distributed Pre-training, arXiv 2604.21428, 2026. The abstract, and "
    "others' summaries of its figures.",
    module=__name__,
    statements=(
        Statement("a", "Of 1.2 million simulated chips 8 learners keep a goodput of .88, elastic data-parallel training .58 (paraphrased, "
            "from others' summaries).",
            "failures as often as let restarts keep .58 by our planner: decoupled keeps .88 or more (lower bound), and restarts .7 at "
            "most (upper bound) in the simulator",
            "holds", _goodput),
        Statement("b", "'strictly zero global downtime'",
            "the longest time in which no learner computes is at most a step, at all three rates of failures and in the whole band; all "
            "seeds", "holds", _never_still),
        Statement("c", "It keeps 'competitive model performance'", "quality under failures", "partly",
            waits="virtual ranks that are lost and come back with others' state"),
    ),
    setup=("Eight virtual learners, rounds of 24 steps, quorum 1, one failure of any learner in 100, 198 or 400 steps on average.",
        "A failed learner is away for 60 steps and loses a whole round of its own; the others go on. An average takes half a step.",
        "Restarts: all stop, lose what they did since the last save (as often as keeps most time; 5 steps each) and 60 steps."),
    limits="The paper's rates of failures were not at hand, so the rate is the one at which restarts keep what its elastic training "
    "kept. Elastic training itself, which goes on with fewer slices, is not modelled; nor is the time until a failure is noticed.",
    plan={
        "failures": Study(going_on, {f"going on, {b:g}": {"recipe": f"decoupled_diloco({ROUND})", "ranks": LEARNERS, "between": b,
            "phi": 0.5, "steps": 720} for b in BETWEEN}, quick={"steps": 48}, seeds=DEAR),
        "restarts": Study(starting_again, {f"starting again, {b:g}": {"recipe": "allreduce", "ranks": LEARNERS, "between": b,
            "steps": 2160} for b in BETWEEN}, quick={"steps": 48}, seeds=DEAR),
    },
    methods=("gossamer.schedules.quorum_rounds", "gossamer.simulated_restarts", "gossamer.planning.losses",
        "gossamer.bench.claims.failing", *TIMED),
    figures=_figures,
)  # fmt: skip
