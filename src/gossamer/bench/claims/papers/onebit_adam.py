"""1-bit Adam: as Adam, after a warm-up.

Once the warm-up is over the second moment stays as it is, and momenta travel as signs with a scale and error feedback.
"""

from gossamer.bench.claims import DEAR, Contest, Evidence, Figure, PaperClaim, Statement
from gossamer.bench.claims.evidence import by_steps_and_bytes
from gossamer.bench.claims.verdict import Judgement, gaps, no_worse

STEPS = 96


def _judge(e: Evidence) -> Judgement:
    ends = {name: e.last("lm-bytes", name, "quality") for name in ("Adam", "1-bit Adam")}
    return no_worse(gaps(ends["1-bit Adam"], ends["Adam"], e.first("lm-bytes", "Adam", "quality")), 0.02, "of progress")


def _figures(e: Evidence) -> list[Figure]:
    return by_steps_and_bytes(e, "lm-bytes", ("Adam", "1-bit Adam"), "loss")


CLAIM = PaperClaim(
    name="onebit_adam",
    paper="Tang et al., 1-bit Adam, ICML 2021",
    module=__name__,
    statements=(
        Statement(
            "a",
            "After a warm-up 1-bit Adam converges as Adam.",
            "gap at most 2 % of Adam's progress, upper bound",
            "partly",
            _judge,
        ),
        Statement(
            "b",
            "It trains faster, by the clock.",
            "seconds to the reference's final quality",
            "partly",
            waits="an honest clock",
        ),
    ),
    setup=(
        f"lm-bytes, four ranks, {STEPS} steps, warm-up of a quarter of them.",
        "Adam is the same update with a warm-up as long as the run: dense averages throughout.",
        "Adam (dense, the same update) and 1-bit Adam with three trials each over the learning rate; three judged seeds.",
    ),
    limits="A warm-up of 24 steps is short, and the frozen second moment is that of early, large "
    "gradients; 96 steps are no whole training.",
    plan={
        "lm-bytes": Contest(
            "lm-bytes",
            {"Adam": f"onebit_adam({STEPS})", "1-bit Adam": f"onebit_adam({STEPS // 4})"},
            steps=STEPS,
            every=16,
            trials=3,
            tuned_steps=48,
            seeds=DEAR,
        )
    },
    figures=_figures,
)
