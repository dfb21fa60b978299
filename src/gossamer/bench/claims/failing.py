"""Ranks that fail at random: what goes on without them, and what stops and starts again from a checkpoint."""

import random
from collections.abc import Sequence
from itertools import accumulate

from gossamer import simulated_restarts
from gossamer.bench.claims.clocks import BAND, crew, model_of, network, no_gradient
from gossamer.bench.claims.evidence import Rows
from gossamer.costs.events import Absence, Begin, Events, SlowSteps
from gossamer.costs.laws import Constant
from gossamer.fabrics.sim import TimeSpan
from gossamer.planning.losses import save_every
from gossamer.planning.work import NoWork
from gossamer.recipe import Recipe
from gossamer.simulate import costs_on, train

AWAY, SAVING = 60.0, 5.0  # seconds of a restart and of a save, where a step computes for one


def moments(seed: int, ranks: int, between: float, until: float) -> list[tuple[int, float]]:
    """Who fails, and when: for each rank at random, so that of all together one fails every `between` seconds on average."""
    out = list[tuple[int, float]]()
    for rank in range(ranks):
        dice = random.Random(f"{seed} {rank} fails")
        for at in accumulate(dice.expovariate(1 / (ranks * between)) for _ in range(1000)):
            if at > until:
                break
            out.append((rank, at))
    return out


def going_on(seed: int, recipe: str, ranks: int, between: float, phi: float, steps: int) -> Rows:
    """The share of time that becomes steps, and the longest time without any rank that computes, for each of the `BAND`.

    A rank that fails is away: its next step takes `AWAY` seconds longer, and a whole round of its steps counts as lost.
    """
    goodput, still, period = list[float](), list[float](), Recipe.of(recipe).schedule.shape.period
    lost = moments(seed, ranks, between, 2.0 * steps)
    events = Events(slow=tuple(SlowSteps(r, 1 + AWAY, 1, Begin(seconds=at)) for r, at in lost))
    for stretch in BAND:
        costs = costs_on(network(ranks, stretch * phi, Constant()), recipe, model_of(), NoWork(), events)
        run = train(crew(recipe, ranks), no_gradient, steps, costs)
        until = min(replica.clock for replica in run.replicas)  # when the first of them has made all its steps
        at_work = _steps(run.spans)
        made = sum(end <= until for _, end in at_work)
        gone = period * sum(at < until for _, at in lost)
        goodput.append((made - gone) / (ranks * until))
        still.append(_longest_gap(at_work, until))
    return {"goodput": goodput, "still": still}


def starting_again(seed: int, recipe: str, ranks: int, between: float, steps: int) -> Rows:
    """The share of time that becomes steps, if all stop at each failure and start again from the last of the best checkpoints."""
    lost = moments(seed, ranks, between, 20.0 * steps)
    events = Events(absences=tuple(Absence(r, AWAY, begin=Begin(seconds=at)) for r, at in lost))
    every = round(save_every(between, AWAY, SAVING) - SAVING)

    def present(numbers: Sequence[int]) -> simulated_restarts.Crew:
        cluster = network(ranks, 1e-6, Constant()).of_nodes(numbers)
        return simulated_restarts.Crew(
            crew(recipe, len(numbers)), no_gradient, costs_on(cluster, recipe, model_of(), NoWork())
        )

    found = simulated_restarts.train(present, ranks, steps, events, simulated_restarts.Restarts(every, SAVING, AWAY))
    return {"goodput": [steps / found.seconds], "still": [AWAY], "restarts": [len(found.restarts)]}


def _steps(spans: Sequence[TimeSpan]) -> list[tuple[float, float]]:
    """From when to when each step of local training computed: of one that was interrupted, the last second."""
    return [(max(span.begin, span.end - 1.0), span.end) for span in spans if span.kind == "computing"]


def _longest_gap(at_work: Sequence[tuple[float, float]], until: float) -> float:
    """The longest time in which no step computes."""
    reached, longest = 0.0, 0.0
    for begin, end in sorted(at_work):
        if begin >= until:
            break
        longest, reached = max(longest, begin - reached), max(reached, end)
    return longest
