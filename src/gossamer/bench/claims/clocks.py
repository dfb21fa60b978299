"""Virtual seconds of recipes, where computing takes a second on average: under laws of computing, on a network, and in a band.

The band is the planner's published error. Beside an emulated accelerator (docs/performance.md, "Planned beside measured") what
a step takes beyond its computing was planned from 31 % too short (PowerSGD at 1 Gbit/s) to 16 % too long (gossip at 200 Mbit/s):
it takes .86 to 1.44 times what is planned. So each time is planned three times, with a network that takes .8, 1 and 1.5 times as
long, and a statement holds only where it does with all three.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import nn

from gossamer import backups
from gossamer.bench.claims.evidence import Evidence, Rows
from gossamer.bench.claims.verdict import Judgement, all_of, at_most, banded, within
from gossamer.costs import Cluster, from_flags
from gossamer.costs.laws import ComputingLaw, Constant, Lognormal, ShiftedExponential, SlowRank
from gossamer.planning.model_cost import ModelCost
from gossamer.planning.work import NoWork
from gossamer.simulate import Replica, costs_on, replicas, train

BAND = (0.8, 1.0, 1.5)  # times what a network takes by the planner: at least, as planned, at most
EXACT = {"ring": 1.0, "pairs": 1.0, "one": 1.0, "shared": 1.0}
TIMED = (  # modules that seconds stand on
    "gossamer.bench.claims.clocks",
    "gossamer.bench.claims.planned",
    "gossamer.fabrics.links",
    "gossamer.fabrics.sim",
    "gossamer.fabrics.sim_mail",
    "gossamer.fabrics.sim_tickets",
    "gossamer.planning.replay",
    "gossamer.simulate",
)
NUMEL = 4096  # of the model whose steps are timed
BYTES = 4 * NUMEL


@final
@dataclass(frozen=True)
class NowAndThen(ComputingLaw):
    """Any rank takes `factor` times as long in a `share` of its steps; of mean 1."""

    share: float
    factor: float

    def at(self, rank: int, step: int) -> float:
        slow = random.Random(f"{rank} {step} now and then").random() < self.share
        return (self.factor if slow else 1.0) / (1 + self.share * (self.factor - 1))


@final
@dataclass(frozen=True)
class DrawnAgain(ComputingLaw):
    """Another law, with draws of its own for each seed: the same for all recipes."""

    law: ComputingLaw
    seed: int

    def at(self, rank: int, step: int) -> float:
        return self.law.at(rank, step + 1_000_000 * self.seed)


LAWS: dict[str, ComputingLaw] = {
    "constant": Constant(),
    "exponential": ShiftedExponential(0.2),
    "lognormal": Lognormal(0.2),
    "now and then": NowAndThen(0.02, 5.0),
    "always slow": SlowRank(2.0),
}
RANDOM = ("exponential", "lognormal", "now and then")


def model_of(size: int = 1) -> ModelCost:
    """A model that computes for a second, and whose gradients are there at the end of it: nothing of an average is hidden
    at every step.
    """
    shapes = {f"w{i}": (NUMEL // size,) for i in range(size)}
    return ModelCost(shapes=shapes, forward=1 / 3, backward=2 / 3, optimizer=0.0, shares=dict.fromkeys(shapes, 1.0))


def network(ranks: int, phi: float, law: ComputingLaw, one_link: float = 1.0) -> Cluster:
    """Ranks between which a dense ring all-reduce of the model takes `phi` seconds; rank 0's link has a share of the others' rate."""
    rate = 2 * (ranks - 1) / ranks * BYTES / phi
    made = from_flags(nodes=ranks, rate=rate, latency=0.0)
    first, others = (replace(made.hosts[0], count=count, memory_rate=1e18) for count in (1, ranks - 1))
    hosts = (replace(first, up=one_link * rate), others)
    return replace(made, hosts=hosts, law=law, payload=1.0, efficiency=EXACT, byte_seconds=0.0, program_seconds=0.0)


def crew(recipe: str, ranks: int) -> list[Replica]:
    """Ranks whose model is timed and does not learn."""
    return replicas(
        recipe,
        lambda: nn.Linear(NUMEL, 1, bias=False),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        ranks,
    )


def no_gradient(model: nn.Module, rank: int, step: int) -> float:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return 0.0


def paced(seed: int, recipe: str, law: str, ranks: int, phi: float, steps: int) -> Rows:
    """Seconds of a mean step for each of the `BAND`; all recipes meet the same draws."""
    return _timed(recipe, steps, [network(ranks, stretch * phi, DrawnAgain(LAWS[law], seed)) for stretch in BAND])


def with_a_slow_link(seed: int, recipe: str, law: str, ranks: int, phi: float, steps: int) -> Rows:
    """The same where rank 0's link has a tenth of the others' rate."""
    return _timed(recipe, steps, [network(ranks, stretch * phi, DrawnAgain(LAWS[law], seed), 0.1) for stretch in BAND])


def _timed(recipe: str, steps: int, clusters: Sequence[Cluster]) -> Rows:
    costs = (costs_on(cluster, recipe, model_of(), NoWork()) for cluster in clusters)
    return {
        "step": [
            train(crew(recipe, each.links.cluster.size), no_gradient, steps, each).seconds / steps for each in costs
        ]
    }


def steps_of(evidence: Evidence, study: str, case: str, place: int) -> dict[int, float]:
    """By seed, the seconds of a step at a place of the band."""
    return {seed: row[place] for seed, row in evidence.rows(study, case, "step").items()}


def share_at_most(evidence: Evidence, study: str, one: str, other: str, bar: float) -> Judgement:
    """A step of `one` takes at most this share of the `other`'s; at the ends of the band one is late and the other is not."""

    def judged(late: int, early: int) -> Judgement:
        ours, theirs = steps_of(evidence, study, one, late), steps_of(evidence, study, other, early)
        return at_most({seed: ours[seed] / theirs[seed] for seed in ours}, bar)

    return banded(judged(1, 1), judged(0, 2), judged(2, 0))


# -- spare ranks: gradients a second in the simulator, beside what order statistics say ------------------------------------------

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
