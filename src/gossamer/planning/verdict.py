"""Says in words what a plan means: whether anything pays, what, and what to change first."""

from collections.abc import Mapping
from functools import cache
from math import inf
from typing import Literal, NamedTuple

from gossamer.core.text import listed
from gossamer.costs.quantities import say_money, say_rate, say_seconds, say_size
from gossamer.planning.plan import Row, TrainingPlan
from gossamer.planning.rates import RATES, TIE, Interval
from gossamer.planning.replay import StepSeconds
from gossamer.recipe import Recipe

HIDDEN = 0.05  # of a step: DDP that waits for less hides its network
SEEN = 0.10  # gains below it are smaller than the model's own error


def sentences(plan: TrainingPlan) -> list[str]:
    """The verdict, then what goes with it."""
    more = (_price, _ties, _first, _latency, _two_levels, _between_shards, _slow_hosts, _memory)
    return [_verdict(plan), *filter(None, (say(plan) for say in more))]


class Verdict(NamedTuple):
    """What kind of sentence stands on top, and which recipe it speaks of."""

    kind: Literal["hidden", "none", "small", "pays"]
    best: str = ""


SENTENCES: Mapping[str, str] = {
    "hidden": "Leave {dense} alone: its network hides behind computing; the most that a faster exchange could gain is {gain} of a "
    "step.",
    "none": "No recipe can be planned here; each row says why.",
    "small": "Leave {dense} alone{also}: {best}, among the fastest recipes here, gains {gain} on it, which is less than this model can see.",
    "pays": "{best}: {step} a step against {base} of {dense}.",
}


def verdict_of(baselines: Mapping[str, StepSeconds], recipes: Mapping[str, float]) -> Verdict:
    """The first rule that applies; baselines begin with the dense one, recipes with the fastest, in seconds a step."""
    dense = next(iter(baselines.values()))
    if 1 - dense.utilisation <= HIDDEN:
        return Verdict("hidden")
    if not recipes:
        return Verdict("none")
    best = _best(recipes)
    gains = {name: 1 - recipes[best] / base.step for name, base in baselines.items()}
    narrow = gains.get("ddp-bf16", gains.get("ddp", 0.0))  # a model in bf16 has no narrower baseline than its own
    if min(gains.values()) < SEEN and narrow < SEEN:
        return Verdict("small", best)
    return Verdict("pays", best)


def _verdict(plan: TrainingPlan) -> str:
    dense = plan.dense
    assert dense.seconds is not None
    baselines = {r.name: r.seconds for r in plan.baselines if r.name != "compute" and r.seconds is not None}
    kind, name = verdict_of(baselines, {row.name: _step(row) for row in plan.possible})
    if kind == "hidden":
        return SENTENCES[kind].format(dense=dense_name(plan), gain=f"{1 - dense.seconds.utilisation:.0%}")
    if kind == "none":
        return SENTENCES[kind]
    best = next(row for row in plan.possible if row.name == name)
    if kind == "small":
        gain = f"{max(1 - _of_narrow(best.of), 0):.0%}"
        quickest = dense_name(plan) if plan.shards == 1 else max(best.of, key=lambda base: best.of[base]).upper()
        return SENTENCES[kind].format(dense=quickest, also=also(plan), best=name, gain=gain)
    return " ".join(filter(None, [*_recommended(plan, best), _against_accumulation(plan, best)]))


def _of_narrow(of: Mapping[str, float]) -> float:
    """The step over that of DDP in bf16, or of DDP where the model is narrow itself; of shards over the quickest baseline's."""
    return of.get("ddp-bf16", of.get("ddp", max(of.values())))


def also(plan: TrainingPlan) -> str:
    """The remedy that needs no recipe, where DDP is not sharded."""
    return ", or turn on bf16" if any(row.name == "ddp-bf16" for row in plan.baselines) else ""


def dense_name(plan: TrainingPlan) -> str:
    return "HSDP" if plan.shards > 1 else "DDP"


def _best(steps: Mapping[str, float]) -> str:
    """The fastest recipe that averages gradients at every step, if it is as fast as the fastest of all; else that one."""
    fastest = next(iter(steps))
    every_step = next((name for name in steps if averages_every_step(name)), fastest)
    return every_step if steps[every_step] <= (1 + TIE) * steps[fastest] else fastest


@cache
def averages_every_step(name: str) -> bool:
    """True if a recipe keeps all ranks' models equal by averaging gradients at every step."""
    shape = Recipe.of(name).schedule.shape
    return shape.averages_gradients and shape.period == 1 and not shape.mixes


def _step(row: Row) -> float:
    assert row.seconds is not None
    return row.seconds.step


def _recommended(plan: TrainingPlan, best: Row) -> list[str]:
    dense = plan.dense
    times = _step(dense) / _step(best)
    out = [
        SENTENCES["pays"].format(
            best=best.name, step=say_seconds(_step(best)), base=say_seconds(_step(dense)), dense=dense_name(plan)
        ),
        f"It may need up to {times:.2g} times as many steps and still be ahead; how many it needs is not this plan's to know: "
        f"'gossamer compare' measures it.",
    ]
    pays = best.pays.get(dense.name, [])
    if pays:
        where = " and ".join(map(_between, pays))
        out.insert(1, f"It pays {where} on these machines.")
    if not averages_every_step(best.name):
        every = next((row for row in plan.possible if averages_every_step(row.name)), None)
        if every is not None:
            out.append(
                f"Of recipes that average at every step, {every.name} is fastest: {say_seconds(_step(every))} a step."
            )
    return out


def _between(rates: Interval) -> str:
    """
    >>> _between(Interval(RATES[0], inf)), _between(Interval(1e6, inf)), _between(Interval(1e6, 2e6))
    ('at every rate', 'above 8 Mbit/s', 'between 8 Mbit/s and 16 Mbit/s')
    """
    if rates.low <= RATES[0]:
        return "at every rate" if rates.high == inf else f"below {say_rate(rates.high)}"
    low = say_rate(rates.low)
    return f"above {low}" if rates.high == inf else f"between {low} and {say_rate(rates.high)}"


def _against_accumulation(plan: TrainingPlan, best: Row) -> str:
    """What accumulating micro-batches alone would reach."""
    name = next((row.name for row in plan.baselines if "micro" in row.name), None)
    if name is None or name not in best.of or 1 - best.of[name] >= SEEN:
        return ""
    return f"DDP with {plan.accumulate} micro-batches a step is as fast, if a batch {plan.accumulate} times as large suits you."


def _price(plan: TrainingPlan) -> str:
    """What is cheapest where prices are told, if the gain can be seen: bytes that nothing waits for may have one."""
    usual = [row for row in plan.baselines if row.name != "compute" and "micro" not in row.name]
    known = [[(r.money.amount, r.name, r.money.currency) for r in rows if r.money] for rows in (usual, plan.possible)]
    if not all(known) or min(known[1])[0] > (1 - SEEN) * min(known[0])[0]:
        return ""
    dense, best = (f"{say_money(1000 * amount, unit)} under {name}" for amount, name, unit in map(min, known))
    return f"1,000 steps cost {best}, and {dense}."


def _ties(plan: TrainingPlan) -> str:
    possible = plan.possible
    level = [row.name for row in possible if _step(row) <= (1 + TIE) * _step(possible[0])]
    return f"Within {TIE:.0%} of the fastest: {', '.join(level)}." if len(level) > 1 else ""


def _first(plan: TrainingPlan) -> str:
    """What to change first, with its gain in one step."""
    dense = _step(plan.dense)
    named = [(what, 1 - step / dense) for what, step in plan.changes.items()]
    if not named or max(gain for _, gain in named) < HIDDEN:
        return ""
    named.sort(key=lambda one: -one[1])
    what, gain = named[0]
    others = "; ".join(f"{other} {max(share, 0):.0%}" for other, share in named[1:])
    return f"What to change first: {what}, which takes {gain:.0%} off a step ({others})."


def _latency(plan: TrainingPlan) -> str:
    best = plan.possible[0] if plan.possible else None
    if best is None or best.seconds is None or best.latency < 0.1 * best.seconds.step:
        return ""
    return f"Meet less often: latency is {best.latency / best.seconds.step:.0%} of the fastest recipe's step."


def _two_levels(plan: TrainingPlan) -> str:
    """Warn of flat recipes that put more through a card than DDP does."""
    if plan.cluster.ranks_per_node == 1 or plan.shards > 1:
        return ""
    dense = plan.dense.seconds
    assert dense is not None
    worse = [
        row.name
        for row in plan.possible
        if row.seconds is not None and "per_node" not in row.name and row.seconds.card > dense.card
    ]
    if not worse:
        return ""
    per_node = plan.cluster.ranks_per_node
    return (
        f"Use two levels, or it costs more than dense: all {per_node} ranks of a node share a card, and {listed(worse)} "
        f"put more through it than DDP; add '+ per_node({per_node})'."
    )


def _between_shards(plan: TrainingPlan) -> str:
    """Say which way recipes are planned to take where `attach` does not take that of HSDP."""
    if plan.shards == 1 or plan.cluster.backend != "nccl":
        return ""
    return (
        "Recipes are planned through the host and gloo: so 'attach' averages between replicas of a sharded model on GPUs, unless it is "
        "given a process group. Copies to the host and back are left out."
    )


def _slow_hosts(plan: TrainingPlan) -> str:
    speeds = [h.speed for h in plan.cluster.hosts]
    if min(speeds) == max(speeds):
        return ""
    return (
        f"Every step waits for the slowest host, which computes at {min(speeds) / max(speeds):.2g} of the fastest one's speed: give each "
        "rank its share of a batch with 'comm.share'."
    )


def _memory(plan: TrainingPlan) -> str:
    needed, memory = plan.model.training_bytes / plan.shards, plan.cluster.memory
    if needed <= memory:
        return ""
    return (
        f"Nothing here fits: parameters, gradients and momenta are {say_size(needed)} of a rank, and a rank may use {say_size(memory)}: "
        "shard the model over more ranks (--shard)."
    )
