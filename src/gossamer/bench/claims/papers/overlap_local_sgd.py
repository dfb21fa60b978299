"""Overlap-Local-SGD: averages that travel during the next round's steps cost no time, and ranks hardly wait for one another."""

from gossamer.bench.claims import DEAR, Contest, Evidence, Figure, Line, PaperClaim, Statement, Study
from gossamer.bench.claims.clocks import BAND, RANDOM, TIMED, paced, steps_of
from gossamer.bench.claims.verdict import Judgement, all_of, at_least, at_most, banded, gaps, no_worse, within

RANKS, PHI = 16, 0.35
HIDDEN = {
    "blocking": "allreduce", "a step late": "allreduce + delayed()", "local, 2": "local_sgd(2)", "overlapped, 1": "overlap_local_sgd(1)",
    "overlapped, 2": "overlap_local_sgd(2)", "overlapped, 8": "overlap_local_sgd(8)",
}  # fmt: skip
MOODY = {"blocking": "allreduce", "local, 8": "local_sgd(8)", "overlapped, 8": "overlap_local_sgd(8)"}


def _exposed(e: Evidence, case: str, place: int) -> dict[int, float]:
    """By seed, the share of a step in which nothing is computed."""
    return {seed: 1 - 1 / step for seed, step in steps_of(e, "hidden", case, place).items()}


def _hides(e: Evidence) -> Judgement:
    def judged(place: int) -> Judgement:
        shown = within(_exposed(e, "blocking", place), 0.2, 1.0)
        return all_of({"overlapped": within(_exposed(e, "overlapped, 2", place), -1e-9, 0.03), "blocking": shown})

    return banded(judged(1), judged(0), judged(2))


def _waits(e: Evidence) -> Judgement:
    def judged(place: int) -> Judgement:
        steps = {case: steps_of(e, "laws", case, place) for case in e.cases("laws")}
        quick = {law: at_most(steps[f"overlapped, 8, {law}"], 1.15) for law in RANDOM}
        return all_of({**quick, **{f"blocking, {law}": at_least(steps[f"blocking, {law}"], 1.3) for law in RANDOM}})

    return banded(judged(1), judged(0), judged(2))


def _always(e: Evidence) -> Judgement:
    return within(steps_of(e, "laws", "overlapped, 8, always slow", 0), 1.9, 2.1)


def _quality(e: Evidence) -> Judgement:
    ends = {name: e.last("fashion", name, "quality") for name in ("dense", "overlapped, 2")}
    return no_worse(
        gaps(ends["overlapped, 2"], ends["dense"], e.first("fashion", "dense", "quality")), 0.02, "of progress"
    )


def _figures(e: Evidence) -> list[Figure]:
    exposed = [
        Line(
            case,
            [
                [stretch * PHI, sum(_exposed(e, case, i).values()) / len(e.run("hidden", case))]
                for i, stretch in enumerate(BAND)
            ],
        )
        for case in e.cases("hidden")
    ]
    learnt = [e.mean_line("fashion", case, "steps", "quality") for case in e.cases("fashion")]
    return [
        Figure(
            "hidden",
            "The share of a step in which nothing is computed",
            "an all-reduce over computing",
            "share",
            lines=exposed,
        ),
        Figure("fashion", "Held-out accuracy on fashion, eight ranks", "steps", "accuracy", lines=learnt),
    ]


CLAIM = PaperClaim(
    name="overlap_local_sgd",
    paper="Wang, Liang, Joshi, Overlap Local-SGD: An Algorithmic Approach to Hide Communication Delays in Distributed SGD, ICASSP "
    "2020. The abstract.",
    module=__name__,
    statements=(
        Statement("a", "It overlaps 'the communication and computation so as to speedup the distributed training procedure'",
            "an all-reduce takes .35 of computing: with rounds of 2 at most 3 % of a step is exposed, where blocking has 20 % or more",
            "holds", _hides),
        Statement("a quality", "It does so at little cost by iteration (paraphrased).",
            "rounds of 2, rates tuned for both: the gap to dense in held-out accuracy is at most 2 % of progress (upper bound)", "partly", _quality),
        Statement("b", "It 'can help to mitigate the straggler effects as well'",
            "three random laws, rounds of 8: a step takes at most 1.15 of computing, where all-reduce takes 1.3 or more (bounds)",
            "holds", _waits),
        Statement("b always", "Against a rank that is always twice as slow it does not help (not in the paper).",
            "a step takes 1.9 to 2.1 of the others' computing; all seeds", "holds", _always),
        Statement("c", "It is more accurate than CoCoD-SGD and elastic averaging (paraphrased).",
            "accuracy at rounds of 1, 2, 8, 24, by shards", "partly", waits="a contest of four recipes at four lengths of rounds"),
    ),
    setup=(
        "a, b: 16 virtual ranks; an all-reduce takes .35 of computing and hides nothing in backward; laws of computing as in the plan.",
        "Each time three times, with a network .8, 1 and 1.5 times as slow as planned, which covers the planner's published error.",
        "a quality: fashion, eight ranks, 312 steps, four trials each over the learning rate, since the pull makes steps shorter.",
    ),
    limits="300 epochs on CIFAR-10, and real links: seconds are the virtual clock's.",
    plan={
        "hidden": Study(paced, {name: {"recipe": recipe, "law": "constant", "ranks": RANKS, "phi": PHI, "steps": 32}
            for name, recipe in HIDDEN.items()}, quick={"steps": 16}, seeds=DEAR),
        "laws": Study(paced, {f"{name}, {law}": {"recipe": recipe, "law": law, "ranks": RANKS, "phi": PHI, "steps": 64}
            for law in (*RANDOM, "always slow") for name, recipe in MOODY.items()}, quick={"steps": 16}, seeds=DEAR),
        "fashion": Contest("fashion", {"dense": "allreduce", "overlapped, 2": "overlap_local_sgd(2)"}, steps=312, every=52, ranks=8,
            trials=4, tuned_steps=104, seeds=DEAR),
    },
    methods=("gossamer.schedules.overlap_local_sgd", *TIMED),
    figures=_figures,
)  # fmt: skip
