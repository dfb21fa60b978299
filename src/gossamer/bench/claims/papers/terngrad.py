"""TernGrad (Wen et al. 2017): ternary gradients cost no accuracy, or little."""

from gossamer.bench import published
from gossamer.bench.claims import DEAR, Contest, Evidence, Figure, PaperClaim, Rows, Statement, Study
from gossamer.bench.claims.training import root_decay
from gossamer.bench.claims.verdict import Judgement, all_of, apart, better, gaps, no_worse, within

FAITHFUL = "allreduce(ternary()) + rule(\"name == '{last}.*'\", allreduce(fp32()))"  # one scale, and a dense last layer
UNCLIPPED = FAITHFUL.replace("ternary()", "ternary(clip=0.0)")
SLOW = 200  # images a second, above which bars are judged: below them a step of the clusters is mostly sending


def bars(seed: int, fabric: str) -> Rows:
    """Images a second of the paper's bars above 200, and the formula's beside them; nothing is random."""
    found = [bar for bar in published.PAPER if bar.fabric == fabric]
    pairs = [
        (paper, bar.speed(size, ternary))
        for bar in found
        for ternary in (False, True)
        for size, paper in zip(published.SIZES, bar.ternary if ternary else bar.dense, strict=True)
        if paper > SLOW
    ]
    return {"paper": [p for p, _ in pairs], "formula": [f for _, f in pairs]}


def _lost(evidence: Evidence, study: str, case: str) -> dict[int, float]:
    """Points of accuracy that a case lost."""
    dense, found = (evidence.last(study, name, "quality") for name in ("dense", case))
    return {s: 100 * d for s, d in apart(dense, found).items()}


def _clipping(evidence: Evidence) -> Judgement:
    without, clipped = (evidence.last("fashion", name, "loss") for name in ("unclipped", "ternary"))
    return better(apart(without, clipped), "nats of training loss")


def _bars(evidence: Evidence) -> Judgement:
    parts = dict[str, Judgement]()
    for fabric in ("ethernet", "infiniband"):
        paper, formula = (evidence.rows("bars", fabric, row) for row in ("paper", "formula"))
        close = {
            s: sum(abs(f / p - 1) <= 0.1 for p, f in zip(paper[s], formula[s], strict=True)) / len(paper[s])
            for s in paper
        }
        parts[fabric] = within(close, 0.95, 1.0)
    return all_of(parts)


def _gap(evidence: Evidence, case: str) -> dict[int, float]:
    dense, found = (evidence.last("lm", name, "quality") for name in ("dense", case))
    return gaps(found, dense, evidence.first("lm", "dense", "quality"))


def _figures(evidence: Evidence) -> list[Figure]:
    cases = ("dense", "ternary", "unclipped", "preset")
    lines = [evidence.mean_line("fashion", case, "steps", "quality") for case in cases]
    return [Figure("accuracy", "Held-out accuracy on fashion", "steps", "accuracy", lines=lines)]


CLAIM = PaperClaim(
    name="terngrad",
    paper="Wen, Xu, Yan, Wu, Wang, Chen, Li 2017: TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep "
    "Learning. The abstract, and the figures of the authors' slides.",
    module=__name__,
    statements=(
        Statement("a",
            "'applying TernGrad on AlexNet doesn't incur any accuracy loss and can even improve accuracy'",
            "fashion: the faithful form loses at most 1.0 point of accuracy (upper bound)",
            "holds", lambda e: no_worse(_lost(e, "fashion", "ternary"), 1.0, "points")),
        Statement("b", "'accuracy loss of GoogLeNet ... is less than 2% on average'",
            "fashion-resnet, group normalisation: less than 2.0 points (upper bound)",
            "partly", lambda e: no_worse(_lost(e, "resnet", "ternary"), 2.0, "points")),
        Statement("clipping", "Clipping at 2.5 standard deviations helps.",
            "fashion: a lower training loss than without clipping (lower bound of the gain above 0)",
            "holds", _clipping),
        Statement("c", "A performance model says how many images a second a cluster trains.",
            "at least 95 % of the paper's bars above 200 images a second within 10 % of its formula, on both clusters",
            "holds", _bars),
        Statement("d", "It is as good on a language model (not in the paper).",
            "lm, 100 steps: the share of dense's progress that the preset lost is at most 2 % (upper bound)",
            "not", lambda e: no_worse(_gap(e, "preset"), 0.02)),
    ),
    setup=(
        "Four ranks with 16 images each (fashion, 938 steps, and fashion-resnet, 200) or 4 windows of text (lm, 100 steps).",
        "SGD at the rate that is the workload's own, found for dense gradients, and left alone; it falls as (1 - t/T)^.5.",
        "Faithful is one scale for all ranks and a dense last layer; the preset rounds the answer too."),
    limits="ImageNet, 90 epochs, and what dropout adds. One epoch of a small network stands for AlexNet.",
    plan={
        "fashion": Contest(
            "fashion",
            {"dense": "allreduce", "ternary": FAITHFUL.format(last=9), "unclipped": UNCLIPPED.format(last=9), "preset": "terngrad"},
            steps=938,
            every=134,
            trials=1,
            rate=root_decay,
        ),
        "resnet": Contest(
            "fashion-resnet",
            {"dense": "allreduce", "ternary": FAITHFUL.format(last=14)},
            steps=200,
            every=100,
            trials=1,
            seeds=DEAR,
            options={"norm": "group"},
            rate=root_decay,
        ),
        "lm": Contest(
            "lm",
            {"dense": "allreduce", "preset": "terngrad", "two levels": "terngrad(levels=3)"},
            steps=100,
            every=50,
            trials=1,
            seeds=DEAR,
            rate=root_decay,
        ),
        "bars": Study(bars, {f: {"fabric": f} for f in ("ethernet", "infiniband")}, seeds=DEAR[:2]),
    },
    methods=("gossamer.bench.published",),
    figures=_figures,
)  # fmt: skip
