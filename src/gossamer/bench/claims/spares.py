"""How many of 100 ranks should be spare: gradients a second in the simulator, beside what order statistics say."""

from gossamer import backups
from gossamer.bench.claims.clocks import DrawnAgain, crew, no_gradient
from gossamer.bench.claims.evidence import Evidence, Rows
from gossamer.bench.claims.verdict import Judgement, all_of, within
from gossamer.costs.laws import ShiftedExponential
from gossamer.simulate import train

MACHINES = 100
TAILS = {"a little": 0.0476, "usual": 0.2308, "a lot": 0.5}  # tail over constant: .05, .3 and 1
TRIED = {"a little": (0, 2, 4, 6, 8, 12), "usual": (0, 4, 8, 16, 24, 32), "a lot": (0, 8, 16, 24, 32, 48)}
SPLITS = {name: {"tail": TAILS[name], "ranks": MACHINES, "steps": 25, "tried": TRIED[name]} for name in TAILS}


def throughput(seed: int, tail: float, ranks: int, steps: int, tried: tuple[int, ...]) -> Rows:
    """Gradients that count a second, for each number of spare ranks; `tail` is the random share of computing."""
    law, found = DrawnAgain(ShiftedExponential(tail), seed), list[float]()
    for spare in tried:
        run = train(crew(f"backup({spare})", ranks), no_gradient, steps, seconds=law.at)
        found.append((ranks - spare) * steps / min(replica.clock for replica in run.replicas))
    return {"spare": [*map(float, tried)], "gradients": found}


def best_split(evidence: Evidence) -> Judgement:
    """The number with most gradients a second, over the optimum of order statistics, within 50 % of 1."""
    parts = dict[str, Judgement]()
    for name, tail in TAILS.items():
        optimum = backups.plan(MACHINES, 1 - tail, tail).backups
        best = {seed: _best(run.rows) / optimum for seed, run in evidence.run("split", name).items()}
        parts[f"tail {tail:g}, optimum {optimum}"] = within(best, 0.5, 1.5, "of the optimum")
    return all_of(parts)


def _best(rows: Rows) -> float:
    return max(zip(rows["gradients"], rows["spare"], strict=True))[1]
