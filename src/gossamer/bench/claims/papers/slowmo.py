"""SlowMo (Wang, Tantia, Ballas, Rabbat 2020): a slow momentum improves local SGD and gossip, and costs no bytes."""

from gossamer.bench.claims import DEAR, Contest, Evidence, Figure, PaperClaim, Statement
from gossamer.bench.claims.verdict import Judgement, apart, better, counted, no_worse, within

SLOW = "allreduce(fp32()) + slowmo({tau}, beta=0.5, buffers='reset')"
PAIRS = (  # study, base, slow momentum
    ("iid", "local", "slow"),
    ("iid", "gossip", "slow gossip"),
    ("label", "local", "slow"),
    ("adam", "local", "slow"),
)


def _gains(evidence: Evidence, study: str, base: str, slow: str) -> dict[str, Judgement]:
    """In training loss, and in held-out quality, which is an accuracy on fashion and a loss on text."""
    losses = apart(evidence.last(study, base, "loss"), evidence.last(study, slow, "loss"))
    one, other = (base, slow) if study == "adam" else (slow, base)
    held = apart(evidence.last(study, one, "quality"), evidence.last(study, other, "quality"))
    return {f"{study}, {base}, training": better(losses), f"{study}, {base}, held out": better(held)}


def _improves(evidence: Evidence) -> Judgement:
    parts = {name: judged for pair in PAIRS for name, judged in _gains(evidence, *pair).items()}
    judged = counted(parts, holds=5, partly=5)
    everywhere = all(part.verdict in ("holds", "partly") for part in parts.values())
    return judged if everywhere or judged.verdict != "holds" else judged._replace(verdict="partly")


def _costs(evidence: Evidence) -> Judgement:
    slow, base = (evidence.last("iid", case, "sent") for case in ("slow", "local"))
    return within({s: slow[s] / base[s] for s in slow}, 0.98, 1.02)


def _longer(evidence: Evidence) -> Judgement:
    slow, base = (evidence.last("iid", case, "quality") for case in ("slow 48", "local"))
    return no_worse(apart(base, slow), 0.0)


def _on_dense(evidence: Evidence) -> Judgement:
    """Holds if slow momentum on averages at every step is not better beyond its bound."""
    slow, dense = (evidence.last("iid", case, "quality") for case in ("slow dense", "dense"))
    gain = better(apart(slow, dense))
    return gain._replace(verdict="not" if gain.verdict == "holds" else "holds")


def _figures(evidence: Evidence) -> list[Figure]:
    cases = evidence.cases("iid")
    lines = [evidence.mean_line("iid", case, "steps", "quality") for case in cases]
    return [Figure("accuracy", "Held-out accuracy on fashion, eight ranks", "steps", "accuracy", lines=lines)]


def _on_fashion(recipes: dict[str, str], shards: str = "iid") -> Contest:
    """Ten rounds of 48, or forty of 12. Trials are short, so that all of it takes less than ten minutes of two cores."""
    return Contest(
        "fashion", recipes, steps=480, every=240, ranks=8, trials=3, tuned_steps=144, shards=shards, seeds=DEAR
    )


CLAIM = PaperClaim(
    name="slowmo",
    paper="Wang, Tantia, Ballas, Rabbat 2020: SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum. The "
    "whole paper.",
    module=__name__,
    statements=(
        Statement("a", "Training loss and accuracy improve over the base for every base and task (Table 1).",
            "four pairs, each in training loss and held-out quality: all 8 better in mean and 5 with bound; 5 in mean: partly",
            "partly", _improves),
        Statement(
            "b", "'at a negligible additional communication cost'", "bytes within 2 % of the base's", "holds", _costs
        ),
        Statement("c", "Rounds that are 2 to 4 times longer still beat the base (Figure 3).",
            "slow momentum with rounds of 48 is no worse than local SGD with rounds of 12 (upper bound)",
            "partly", _longer),
        Statement("d", "On averages at every step there is no improvement (Section 4).",
            "the gain in accuracy is not above 0 with its lower bound", "holds", _on_dense),
        Statement(
            "time", "294 ms against 282 ms a step (Table 2).", "virtual step times", "holds", waits="published times"
        ),
    ),
    setup=(
        "fashion on eight ranks of 16 images, 480 steps, with iid shards and shards by label; lm-bytes with Adam on four, 200 steps.",
        "Each contender has three trials a quarter as long (learning rate, and what else its parts declare), the best goes on.",
        "Rounds of 12 steps, of gossip 24; slow momentum .5 at first, buffers reset under SGD and kept under Adam.",
    ),
    limits="90 to 200 epochs: slow momentum needs time, and 480 steps are 40 rounds.",
    plan={
        "iid": _on_fashion(
            {"dense": "allreduce", "slow dense": SLOW.format(tau=1), "local": "local_sgd(12)", "slow": SLOW.format(tau=12)}
            | {"slow 48": SLOW.format(tau=48), "gossip": "sgp", "slow gossip": "slowmo_sgp(24)"},
        ),
        "label": _on_fashion({"local": "local_sgd(12)", "slow": SLOW.format(tau=12)}, shards="label"),
        "adam": Contest(
            "lm-bytes",
            {"local": "local_sgd(12)", "slow": SLOW.format(tau=12).replace("reset", "maintain")},
            steps=204, every=102, trials=3, tuned_steps=48, seeds=DEAR,
        ),
    },
    figures=_figures,
)  # fmt: skip
