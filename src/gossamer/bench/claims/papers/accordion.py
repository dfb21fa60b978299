"""Accordion (Agarwal et al. 2021): compress less while training is critical, and more else."""

from gossamer.bench.claims import DEAR, Contest, Evidence, Figure, PaperClaim, Statement
from gossamer.bench.claims.evidence import mean
from gossamer.bench.claims.verdict import Judgement, all_of, apart, better, gaps, no_worse, ratios

STEPS, EPOCH, CUT = 240, 16, 160
RECIPES = {
    "dense": "allreduce",
    "low": "powersgd(4)",
    "high": "powersgd(1)",
    "accordion": f"accordion({EPOCH}, 4, 1, interval=2)",
}


def cut(done: float) -> float:
    """The learning rate is a tenth from step 160 of 240 on.

    >>> cut(0.5), cut(0.7)
    (1.0, 0.1)
    """
    return 1.0 if done < CUT / STEPS else 0.1


def _quality(evidence: Evidence) -> Judgement:
    start, low = evidence.first("lm", "low", "quality"), evidence.last("lm", "low", "quality")
    lost = {case: gaps(evidence.last("lm", case, "quality"), low, start) for case in ("high", "accordion")}
    return all_of(
        {
            "as good as rank 4": no_worse(lost["accordion"], 0.02),
            "rank 1 loses over a tenth": better({s: gap - 0.1 for s, gap in lost["high"].items()}),
        }
    )


def _bytes(evidence: Evidence) -> Judgement:
    sent = {case: evidence.last("lm", case, "sent") for case in ("low", "high", "accordion")}
    half = {s: (sent["low"][s] + sent["high"][s]) / 2 for s in sent["low"]}
    judged = better(apart(half, sent["accordion"]), "bytes")
    if judged.verdict != "holds" and mean(ratios(sent["low"], sent["accordion"])) > 1:
        return judged._replace(verdict="partly")
    return judged


def _figures(evidence: Evidence) -> list[Figure]:
    by_step = [evidence.mean_line("lm", case, "steps", "quality") for case in RECIPES]
    by_bytes = [evidence.mean_line("lm", case, "sent", "quality") for case in RECIPES if case != "dense"]
    return [
        Figure("loss", "Held-out loss of lm", "steps", "nats", lines=by_step),
        Figure("bytes", "Held-out loss of lm by bytes", "bytes a rank", "nats", log_x=True, lines=by_bytes),
    ]


CLAIM = PaperClaim(
    name="accordion",
    paper="Agarwal, Wang, Lee, Venkataraman, Papailiopoulos 2021: Accordion: Adaptive Gradient Communication via Critical Learning "
    "Regime Identification. The abstract, and the authors' own logs.",
    module=__name__,
    statements=(
        Statement(
            "a",
            "'maintains similar model accuracy to uncompressed training'",
            "the gap to rank 4 is at most 2 % (upper bound), while rank 1's is over 10 % (lower bound)",
            "partly",
            _quality,
        ),
        Statement(
            "bytes",
            "'up to 5.5x better compression ... over static approaches'",
            "fewer bytes than half way between ranks 4 and 1: holds; fewer than rank 4: partly",
            "partly",
            _bytes,
        ),
        Statement(
            "c",
            "A growing batch: 512, 4,096 and Accordion end at 94.49, 93.21 and 94.34 %, with 5.49 times fewer exchanges (logs).",
            "equal samples, accuracy within 1 point of the small batch, a third of the exchanges",
            "holds",
            waits="contests whose contenders take different numbers of steps",
        ),
        Statement(
            "d",
            "Compressing early, or after the learning rate drops, hurts; elsewhere it does not.",
            "rank 1 in the middle third has the smallest gap of three (bound against both)",
            "partly",
            waits="a recipe that changes at given steps",
        ),
    ),
    setup=(
        "lm on four ranks, 240 steps as 15 epochs of 16, the learning rate a tenth from step 160 on.",
        "PowerSGD of rank 4, of rank 1, and Accordion between them, which decides every second epoch; dense beside.",
        "All at the workload's own rate.",
    ),
    limits="300 epochs, of which nine tenths are uncritical: there 5.5 times comes from. 15 short epochs decide seven times.",
    plan={"lm": Contest("lm", RECIPES, steps=STEPS, every=80, trials=1, seeds=DEAR, rate=cut)},
    figures=_figures,
)
