"""DIANA: differences of gradients reach the optimum where quantised gradients stall. Full gradients, float64."""

from gossamer.bench.claims import DEAR, Evidence, Figure, PaperClaim, Statement, Study
from gossamer.bench.claims.differences import (
    L1,
    as_fast,
    falls,
    fewer_bits,
    fewer_steps,
    measure,
    slowed,
    sparse_too,
    with_and_without,
)

BLOCK = 16
TERNARY = "gather(ternary(clip=0.0))"
QSGD = f"gather(qsgd(bits=2, bucket={BLOCK}))"
KINDS = {
    "ternary": (TERNARY, "max", 32),  # one tensor of 32 elements
    "qsgd": (QSGD, "max", BLOCK),
    "l2": (f"gather(qsgd(bits=2, bucket={BLOCK}, norm='l2'))", "l2", BLOCK),
}


def _figures(evidence: Evidence) -> list[Figure]:
    cases = ("dense", "ternary diana", "qsgd diana", "l2 diana", "ternary", "qsgd")
    figures = list[Figure]()
    for x, name in (("steps", "steps"), ("sent", "bytes of a rank")):
        lines = [evidence.mean_line("ridge", c, x, "distance") for c in cases]
        figures.append(Figure(x, f"Distance over {name}", name, "squared distance", x == "sent", True, lines))
    return figures


def _case(recipe: str, norm: str, block: int) -> dict[str, object]:
    return {"recipe": recipe, "norm": norm, "block": block, "steps": 1600, "every": 80}


MEMORIES = {"": "", " diana": " + diana()"}
CASES = {
    "dense": _case("allreduce", "none", 1),
    **{f"{k}{m}": _case(KINDS[k][0] + MEMORIES[m], *KINDS[k][1:]) for m in MEMORIES for k in KINDS},
    **{f"l1{m}": _case(f"{QSGD}{MEMORIES[m]} + every_step(l1={L1})", "max", BLOCK) for m in MEMORIES},
}
GAIN = "steps to a squared distance of 1e-10"
CLAIM = PaperClaim(
    name="diana",
    paper="Mishchenko, Gorbunov, Takac, Richtarik, Distributed Learning with Compressed Gradient Differences, 2019 (abstract read)",
    module=__name__,
    statements=(
        Statement(
            "a",
            "Compressing differences reaches the true optimum in batch mode; compressing gradients does not.",
            "squared distance <= 1e-20 with memory, >= 1e-6 without, all seeds, three quantisers",
            "holds",
            with_and_without,
        ),
        Statement(
            "b",
            "It works with a nonsmooth regulariser.",
            "with l1: squared distance <= 1e-18 and the exact support; without memory more",
            "holds",
            sparse_too,
        ),
        Statement(
            "c",
            "Its rate is linear, as fast as the theory says.",
            "-slope of log distance times the theory's complexity >= 1, all seeds, three quantisers",
            "holds",
            as_fast,
        ),
        Statement(
            "c bits",
            "It needs fewer bits than dense gradients.",
            "bytes to 1e-10: dense over DIANA's - 1, better",
            "holds",
            fewer_bits,
        ),
        Statement(
            "d",
            "The l-infinity norm needs fewer steps than l2 at the same block size.",
            f"{GAIN}: l2 less max, better",
            "partly",
            fewer_steps,
        ),
        Statement(
            "e",
            "TernGrad (no memory, l-infinity) has a convergence rate.",
            "slope of log distance over log step in [-1.2, -.8] at rates that fall as 1 / t",
            "holds",
            falls,
        ),
    ),
    setup=(
        "Ridge regression in 32 dimensions, eight ranks with a source of their own each, full gradients, float64.",
        "Blocks of 16 (ternary: one tensor), the theory's step sizes, dense at 2 / (L + mu); 1,600 steps; three judged seeds, five for rates that fall.",
        "Distances are to the optimum in closed form; for l1 = .05 to that of 5,000 proximal steps.",
    ),
    limits="Its figures train networks on CIFAR-10, and have no table to compare with. Ridge regression alone: logistic "
    "regression here is so ill-conditioned that the theory's steps to 1e-20 take over ten minutes.",
    plan={
        "ridge": Study(measure, CASES, quick={"steps": 60, "every": 20}, seeds=DEAR),
        "slowed": Study(slowed, {"ternary": {"recipe": TERNARY, "steps": 1200, "every": 40}}, quick={"steps": 80}),
    },
    methods=(
        "gossamer.bench.claims.convex",
        "gossamer.bench.claims.differences",
        "gossamer.memories.diana",
        "gossamer.memories.learning",
        "gossamer.codecs.qsgd",
        "gossamer.codecs.ternary",
        "gossamer.exchanges.gather",
    ),
    figures=_figures,
)
