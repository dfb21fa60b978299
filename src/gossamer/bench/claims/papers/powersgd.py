"""PowerSGD: low rank with error feedback as accurate as dense gradients."""

from gossamer.bench.claims import DEAR, Contest, Evidence, Figure, PaperClaim, Statement
from gossamer.bench.claims.evidence import by_steps_and_bytes
from gossamer.bench.claims.verdict import Judgement, apart, no_worse


def _judge(e: Evidence) -> Judgement:
    dense, method = (e.last("fashion", name, "quality") for name in ("dense", "rank 4"))
    return no_worse(apart(dense, method), 0.01, "of accuracy")


def _figures(e: Evidence) -> list[Figure]:
    return by_steps_and_bytes(e, "fashion", ("dense", "rank 4"), "accuracy")


CLAIM = PaperClaim(
    name="powersgd",
    paper="Vogels, Karimireddy, Jaggi, PowerSGD, NeurIPS 2019",
    module=__name__,
    statements=(
        Statement(
            "a",
            "Rank 4 with error feedback is no less accurate than dense gradients.",
            "accuracy lost at most 1.0 point, upper bound",
            "holds",
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
        "fashion, four ranks, 312 steps.",
        "Dense and rank 4 with four trials each of 104 steps over the learning rate; three judged seeds.",
    ),
    limits="A third of an epoch of a small network, and no time is measured.",
    plan={
        "fashion": Contest(
            "fashion",
            {"dense": "allreduce", "rank 4": "powersgd(4)"},
            steps=312,
            every=52,
            trials=4,
            tuned_steps=104,
            seeds=DEAR,
        )
    },
    figures=_figures,
)
