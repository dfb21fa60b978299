"""Sparse global plus local gradients (Aji, Heafield, Bogoychev 2019): local gradients repair what dropping breaks."""

from gossamer.bench.claims import DEAR, Contest, Evidence, Figure, PaperClaim, Statement
from gossamer.bench.claims.verdict import Judgement, all_of, better, gaps, no_worse

FAMILIES = {"transformer": "translate", "rnn": "translate-rnn"}
RECIPES = {
    "dense": "allreduce",
    "dropping": "gather(topk(0.01)) + error_feedback()",
    "partial": "gather(topk(0.01)) + own_gradient() + resync(every=50)",
}


def _gap(evidence: Evidence, family: str, case: str) -> dict[int, float]:
    dense, found = (evidence.last(family, name, "quality") for name in ("dense", case))
    return gaps(found, dense, evidence.first(family, "dense", "quality"))


def _degrades(evidence: Evidence) -> Judgement:
    large, small = (_gap(evidence, family, "dropping") for family in FAMILIES)
    return all_of(
        {
            "a gap on the Transformer": better(large),
            "more than twice the RNN's": better({s: large[s] - 2 * small[s] for s in large}),
        }
    )


def _restores(evidence: Evidence) -> Judgement:
    dropped, repaired = (_gap(evidence, "transformer", case) for case in ("dropping", "partial"))
    return better({s: dropped[s] / 3 - repaired[s] for s in dropped})


def _rnn(evidence: Evidence) -> Judgement:
    """Its loss after all steps is dense's or lower: then it came to dense's final loss in no more steps."""
    return no_worse(_gap(evidence, "rnn", "partial"), 0.0)


def _figures(evidence: Evidence) -> list[Figure]:
    return [
        Figure(
            family,
            f"Held-out accuracy of tokens, {family}",
            "steps",
            "accuracy",
            lines=[evidence.mean_line(family, case, "steps", "quality") for case in RECIPES],
        )
        for family in FAMILIES
    ]


def _contest(workload: str) -> Contest:
    return Contest(workload, RECIPES, steps=200, every=50, trials=1, seeds=DEAR)


CLAIM = PaperClaim(
    name="sparse_plus_local",
    paper="Aji, Heafield, Bogoychev 2019: Combining Global Sparse Gradients with Local Gradients in Distributed Neural Network "
    "Training. The abstract.",
    module=__name__,
    statements=(
        Statement(
            "a",
            "'Transformer models degrade dramatically while the impact on RNNs is smaller'",
            "the Transformer's gap under dropping is above 0, and above twice the RNN's (lower bounds)",
            "partly",
            _degrades,
        ),
        Statement(
            "b",
            "'Transformer convergence is restored'",
            "with local gradients its gap is at most a third of dropping's (lower bound of the difference)",
            "holds",
            _restores,
        ),
        Statement(
            "b2",
            "'while RNNs converge faster'",
            "with local gradients the RNN ends no worse than dense (upper bound of the gap at most 0)",
            "partly",
            _rnn,
        ),
        Statement(
            "c",
            "'training on 4 nodes converges up to 1.5x as fast as with uncompressed gradients and scales 3.5x'",
            "virtual time to dense's last quality",
            "partly",
            waits="the planner's times to be published with their error",
        ),
    ),
    setup=(
        "Four ranks with 8 sentences each, Adam at the workload's own rate, 200 steps: a Transformer and an RNN that translate.",
        "Dropping sends the top 1 percent with error feedback; partial adds each rank's own gradient, and averages models every 50 steps.",
        "The gap is the share of dense's progress that was lost, in held-out accuracy of tokens.",
    ),
    limits="BLEU on WMT: 200 steps translate nothing, so accuracy of tokens stands in. The authors' averages are every 500 steps.",
    plan={family: _contest(workload) for family, workload in FAMILIES.items()},
    figures=_figures,
)
