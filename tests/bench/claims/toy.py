"""A claim for the tests: a function that takes no time, and one contest with a contender that is sabotaged on purpose."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from gossamer.bench.claims import Contest, Evidence, Figure, PaperClaim, Statement, Study
from gossamer.bench.claims.evidence import Rows
from gossamer.bench.claims.verdict import apart, better, gaps, no_worse, within


@contextmanager
def in_this_process() -> Generator[ThreadPoolExecutor]:
    """Runs one at a time and without processes that load torch: an interrupt then comes between any two of them."""
    with ThreadPoolExecutor(1) as pool:
        yield pool
        pool.shutdown(cancel_futures=True)


def measure(seed: int, scale: float) -> Rows:
    return {"x": [0.0, 1.0], "y": [seed * scale, 2 * seed * scale]}


def _ratio(evidence: Evidence):
    return within(evidence.last("numbers", "two", "y"), 4.0 * 30, 4.0 * 34)


def _gaps(evidence: Evidence, case: str) -> dict[int, float]:
    ends = {name: evidence.last("training", name, "quality") for name in ("dense", case)}
    return gaps(ends[case], ends["dense"], evidence.first("training", "dense", "quality"))


def _figures(evidence: Evidence) -> list[Figure]:
    return [Figure("numbers", "Numbers", "x", "y", lines=[evidence.mean_line("numbers", "two", "x", "y")])]


CLAIM = PaperClaim(
    name="toy",
    paper="Nobody (2026)",
    module=__name__,
    statements=(
        Statement("a", "Two is twice one.", "each value in a range", "holds", _ratio),
        Statement("b", "Half is no worse.", "gap at most 2 %", "not", lambda e: no_worse(_gaps(e, "halved"), 0.02)),
        Statement("c", "Dense is no worse.", "gap at most 2 %", "holds", lambda e: no_worse(_gaps(e, "again"), 0.02)),
        Statement(
            "d",
            "Dense is better.",
            "loss",
            "not",
            lambda e: better(apart(e.last("training", "dense", "quality"), e.last("training", "again", "quality"))),
        ),
        Statement("e", "Faster.", "time", "holds", waits="an honest clock"),
    ),
    setup=("Numbers, and ridge regression.",),
    limits="Everything.",
    plan={
        "numbers": Study(measure, {"one": {"scale": 1.0}, "two": {"scale": 2.0}}, quick={"scale": 0.5}),
        "training": Contest(
            "ridge",
            {"dense": "allreduce", "halved": "allreduce + every_step(rate=0.5)", "again": "allreduce(fp32())"},
            steps=30,
            every=10,
            ranks=2,
            trials=1,
        ),
        "tuned": Contest("ridge", {"dense": "allreduce"}, steps=10, every=5, ranks=2, trials=3, seeds=(30, 31)),
    },
    figures=_figures,
)
