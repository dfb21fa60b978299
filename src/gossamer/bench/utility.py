"""When does compression pay in a data centre? The set-ups of Agarwal et al. (MLSys 2022), answered by our own planner.

Three models, two lengths of a step, five rates and three numbers of GPUs, one a node; DDP overlaps its all-reduces. Nothing here
is measured: work is passes over a data-centre GPU's memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from gossamer.costs import Cluster, from_flags
from gossamer.planning.baselines import ddp
from gossamer.planning.model_cost import ModelCost
from gossamer.planning.model_shapes import known_model
from gossamer.planning.plan import prepare
from gossamer.planning.rates import TIE, Interval, pays_between
from gossamer.planning.work import MemoryPasses

STEPS: Mapping[str, tuple[float, float]] = {  # seconds of a step with a small and with a large batch
    "resnet50": (0.07, 0.25),
    "resnet101": (0.10, 0.30),
    "bert-base": (0.12, 0.35),
}
EQUAL = 0.25  # seconds of a step of all models, where their parameters are compared
RATES = (1, 4, 10, 25, 100)  # Gbit/s
RANKS = (8, 32, 96)
RECIPES: Mapping[str, str] = {
    "PowerSGD, rank 4": "powersgd(4)",
    "sign": "gather(sign()) + error_feedback()",
    "top 1 %": "topk(0.01)",
    "QSGD, 4 bits": "qsgd(bits=4)",
    "TernGrad": "terngrad",
}
GATHERS = ("sign", "top 1 %")  # whose bytes grow with the number of ranks
GAIN = 0.10


class Setup(NamedTuple):
    """One set-up of the grid."""

    model: str
    step: float
    gbit: float
    ranks: int


@dataclass(frozen=True)
class Cell:
    """The steps' seconds of one set-up: the baselines, and each recipe."""

    setup: Setup
    ddp: float
    bf16: float
    without_overlap: float  # DDP, all of whose gradients are averaged after backward
    recipes: Mapping[str, float]
    apart: Mapping[str, float]  # the recipes, none of whose work and transfers overlap

    def gains(self, against: str = "ddp") -> dict[str, float]:
        """The share of a baseline's step that each recipe saves."""
        base = {"ddp": self.ddp, "bf16": self.bf16, "without overlap": self.without_overlap}[against]
        return {name: 1 - step / base for name, step in self.recipes.items()}


class Statement(NamedTuple):
    """A statement of the paper, and what our planner says to it."""

    says: str
    holds: bool
    found: str


def setups() -> list[Setup]:
    return [
        Setup(model, step, gbit, ranks)
        for model, steps in STEPS.items()
        for step in steps
        for ranks in RANKS
        for gbit in RATES
    ]


def cells() -> list[Cell]:
    """All set-ups. What a recipe does is cut into pieces once for each model and number of ranks."""
    out = list[Cell]()
    for model, steps in STEPS.items():
        for ranks in RANKS:
            planned = _Planned(model, ranks)
            out += [planned.cell(Setup(model, step, gbit, ranks)) for step in steps for gbit in RATES]
    return out


class _Planned:
    """The recipes on one model and number of ranks, ready to be replayed."""

    def __init__(self, model: str, ranks: int) -> None:
        self._cluster = from_flags(nodes=ranks, gpus=1, rate=1e9)
        self._model = known_model(model, STEPS[model][0])
        work = MemoryPasses(self._cluster.memory_rate)
        self._prepared = {n: prepare(r, self._model, self._cluster, work) for n, r in RECIPES.items()}

    def cell(self, setup: Setup) -> Cell:
        there, model = self._cluster.at_rate(setup.gbit * 1e9 / 8), known_model(setup.model, setup.step)
        dense, bf16 = (ddp(model, setup.ranks, bf16=b).seconds(there).step for b in (False, True))
        recipes = {name: self.seconds(name, model, there) for name in self._prepared}
        late = _at_once(model)
        apart = {name: self.seconds(name, late, there) for name in self._prepared}
        return Cell(setup, dense, bf16, ddp(late, setup.ranks).seconds(there).step, recipes, apart)

    def seconds(self, name: str, model: ModelCost, there: Cluster) -> float:
        prepared = self._prepared[name]
        return replace(prepared, model=replace(model, buckets=prepared.model.buckets)).seconds(there).step

    def breaks_even(self, name: str, step: float) -> float:
        """The rate, in bytes a second, up to which a recipe is faster than DDP by over a tie; 0 where it never is."""
        model = known_model(self._model.name, step)
        dense = ddp(model, self._cluster.size)

        def ratio(rate: float) -> float:
            there = self._cluster.at_rate(rate)
            return self.seconds(name, model, there) / dense.seconds(there).step

        found: Sequence[Interval] = pays_between(ratio)
        return found[-1].high if found else 0.0


def _at_once(model: ModelCost) -> ModelCost:
    """The same model, all of whose gradients are there when backward ends: nothing overlaps."""
    return replace(model, shares=dict.fromkeys(model.shares, 1.0))


def break_evens(ranks: int = 32) -> dict[str, dict[tuple[str, float], float]]:
    """By recipe, the rate up to which it pays, for each model and seconds of a step."""
    planned = {model: _Planned(model, ranks) for model in STEPS}
    return {
        name: {(m, step): planned[m].breaks_even(name, step) for m, steps in STEPS.items() for step in {*steps, EQUAL}}
        for name in RECIPES
    }


def statements(grid: Sequence[Cell], edges: Mapping[str, Mapping[tuple[str, float], float]]) -> list[Statement]:
    """The six statements, judged by the grid and the break-even rates."""
    return [judge(grid) for judge in (_rarely, _slow_links, _gathers)] + [
        _edges(edges),
        *(judge(grid) for judge in (_overlap, _bf16)),
    ]


def _share(grid: Sequence[Cell], least: float, against: str = "ddp", leave_out: Sequence[str] = ()) -> tuple[int, int]:
    """How many pairs of a set-up and a recipe gain more than `least`, and how many there are."""
    gains = [g for cell in grid for name, g in cell.gains(against).items() if name not in leave_out]
    return sum(g > least for g in gains), len(gains)


def _rarely(grid: Sequence[Cell]) -> Statement:
    fast = [c for c in grid if c.setup.gbit >= 10]
    won, all = _share(fast, GAIN)
    late = sum(1 - step / c.ddp > GAIN for c in fast for step in c.apart.values())
    says = "From 10 Gbit/s on, at most one in ten gains over 10 % on overlapped DDP"
    return Statement(
        says, won <= all / 10, f"{won} of {all} do, {won / all:.0%}; {late} where nothing of a recipe overlaps"
    )


def _slow_links(grid: Sequence[Cell]) -> Statement:
    won, all = _share([c for c in grid if c.setup.gbit == 1], GAIN, leave_out=GATHERS)
    says = "At 1 Gbit/s over half of those that need no gather gain over 10 %"
    return Statement(says, won > all / 2, f"{won} of {all} do, {won / all:.0%}")


def _gathers(grid: Sequence[Cell]) -> Statement:
    by = {cell.setup: cell.gains()["top 1 %"] for cell in grid}
    kept = [s for s in by if s.ranks == RANKS[0] and by[s] > TIE]
    least, middle, most = ({s: by[s._replace(ranks=n)] for s in kept} for n in RANKS)
    worse = [s for s in kept if most[s] < least[s]]
    always = [s for s in worse if most[s] < middle[s] < least[s]]
    says = "Top-k by a gather loses as ranks are added"
    return Statement(
        says,
        len(worse) == len(kept),
        f"its gain is less at 96 ranks than at 8 in {len(worse)} of {len(kept)} set-ups where it pays; in {len(always)} also at 32",
    )


def _edges(edges: Mapping[str, Mapping[tuple[str, float], float]]) -> Statement:
    wrong, all = list[str](), 0
    for name, found in edges.items():
        for model, (short, long) in STEPS.items():
            wrong += [f"{name} on {model}"] if found[model, long] > 1.02 * found[model, short] else []
        for a, b in pairwise(STEPS):
            wrong += [f"{name} from {a} to {b}"] if 1.02 * found[b, EQUAL] < found[a, EQUAL] else []
        all += 2 * len(STEPS) - 1
    says = "The rate up to which each pays falls as computing grows, and rises with the parameters"
    but = f", but for {', '.join(wrong)}" if wrong else ""
    return Statement(says, not wrong, f"{all - len(wrong)} of {all} comparisons go that way{but}")


def _overlap(grid: Sequence[Cell]) -> Statement:
    fast = [c for c in grid if c.setup.gbit >= 10]
    (won, all), (fair, _) = _share(fast, GAIN, "without overlap"), _share(fast, GAIN)
    says = "From 10 Gbit/s on, compression looks better beside DDP that does not overlap"
    return Statement(says, won > fair, f"{won} of {all} gain over 10 % on it, {fair} on DDP as it is")


def _bf16(grid: Sequence[Cell]) -> Statement:
    (won, all), (dense, _) = _share(grid, GAIN, "bf16"), _share(grid, GAIN)
    halved = [c.ddp - min(c.recipes.values()) for c in grid if c.setup.gbit == 1]
    left = [c.bf16 - min(c.recipes.values()) for c in grid if c.setup.gbit == 1]
    part = sum(left) / sum(halved)
    says = "Against DDP in bf16, about half is left to gain"
    return Statement(
        says, 0.3 <= part <= 0.6, f"at 1 Gbit/s {part:.0%}; {won} of {all} gain over 10 % on it, {dense} on fp32"
    )
