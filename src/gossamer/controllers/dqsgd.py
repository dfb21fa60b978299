"""DQ-SGD: choose the number of bits at every step, for the least error of the whole run."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import exp, log, log2
from typing import Any, Literal, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from gossamer.codecs.mixed import levelled, written_by
from gossamer.controllers.allocation import Demand, Numbers, of_widths, within_budget, within_noise
from gossamer.controllers.forecast import Law, forecast
from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Controller, Exchange, Facts, Levelled
from gossamer.core.parts import part, require

AHEAD = 8  # points at which the steps to come are looked at
SMOOTH = 0.9  # how much of the norms there were stays in their average: gradients are noisy
SMALL = 2048  # elements of parameters that are not worth bits of their own: they go with the one before
TELLS = 2  # numbers: how far elements are from what they are rounded against, and a one, to count ranks by


class BitsGroup(NamedTuple):
    """Adjacent parameters with the same number of bits, and the number of their elements."""

    names: tuple[str, ...]
    size: int


@final
@part("dqsgd", sample="dqsgd(1000)")
class DQSGD(Controller):
    """Choose the bits of a codec with evenly spaced levels at every step, from the norms of all ranks' gradients.

    Rounding at step t adds at most v_t = d G_t^2 / (4 s_t^2) to the mean's variance, s_t = 2^(bits - 1) - 1 levels on each side
    of zero and G_t the norms of the quantiser, over N ranks, and those of the mean where it is written again. In the end a
    fraction a^(T - t) of it is left, as progress wears it off. The least error for a budget of bits, and the fewest bits for
    an error, have sum a^(T - t) v_t smallest at  s_t^3 / (1 + s_t) = c a^(T - t) G_t^2:  with many levels s_t = k a^((T - t)
    / 2) G_t. So bits follow the norm of the gradients, and grow towards the end by half of log2(1 / a) a step.

    `bits` are those on the wire, an element's sign included and a bucket's norm not, on average over `steps`; the bits that were
    sent are counted, and the rest is planned again at every step. `error` instead limits what rounding may add to the loss:
    (L lr^2 / 2) sum a^(T - t) v_t <= error, with L the `smoothness`, by default 1 / lr; `bits` is then ignored. `final` is
    a^T, at the rate of the first step: in a problem of curvature k (1 - lr k)^(2 T). Where it is said too large and gradients
    fall fast, bits are spent on early noise that would have worn off. `per="layer"` gives every parameter its own bits, by the
    same rule with one c; parameters of fewer than 2048 elements share those of the one before. A width changes only for one that is nearer by more
    than `slack` bits. After `steps` nothing changes any more. If the learning rate will be cut, pass when and by how much, as to
    MultiStepLR: `milestones`, `gamma`; noise after a cut counts gamma^2 times as much as before.

    Layers are compared by norms averaged over about ten steps. Future norms are extrapolated from past ones, as a power of time
    or exponentially, whichever fits, for as many steps as were seen. Where neither fits, and beyond that, the budget is spread
    evenly: so it is no worse than fixed bits. All ranks have the same norms, and decide the same. `comm.recipe` shows the
    decision, as the exchange and as routes. It needs no new bucket state.

    Use: around `qsgd()`, in runs of known length, with `per="layer"`: 3 bits then trained a small Transformer as well as dense,
    where 3 bits for all layers lost some quality.

    Not for: runs of unknown length; models of one layer or of similar layers, with a constant norm.

    Wire: an all-reduce of 16 bytes per bucket (per parameter with `per="layer"`) at each step.

    >>> DQSGD(1000, bits=3.5, per="layer")
    dqsgd(1000, bits=3.5, per='layer')

    Paper: Yan, Huang, Lan, Song, DQ-SGD: Dynamic Quantization in SGD for Communication-Efficient Distributed Learning, 2021.
    """

    steps: int
    bits: float = 4.0
    error: float | None = None
    per: Literal["model", "layer"] = "model"
    least: float = 2.0
    most: float = 8.0
    final: float = 0.1
    slack: float = 0.3
    smoothness: float | None = None
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1

    def __post_init__(self) -> None:
        require(
            self.steps >= 1, f"dqsgd: steps must be at least 1, got {self.steps}; pass the number of steps of the run"
        )
        require(
            2 <= self.least <= self.most <= 8,
            f"dqsgd: must have 2 <= least <= most <= 8 bits, got {self.least} and {self.most}",
        )
        require(
            self.error is not None or self.least <= self.bits <= self.most,
            f"dqsgd: bits must lie between {self.least} and {self.most}, got {self.bits} (the sign included); change bits, least or most",
        )
        require(self.error is None or self.error > 0, f"dqsgd: error must be positive, got {self.error}")
        require(0 < self.final <= 1, f"dqsgd: final must lie in (0, 1], got {self.final}; 1 forgets nothing")
        require(self.slack >= 0, f"dqsgd: slack must not be negative, got {self.slack}")
        require(
            self.smoothness is None or self.smoothness > 0,
            f"dqsgd: smoothness must be positive, got {self.smoothness}; leave it out for 1 / lr",
        )
        require(
            all(m >= 1 for m in self.milestones) and list(self.milestones) == sorted(set(self.milestones)),
            f"dqsgd: milestones must be steps after which the rate is cut, in ascending order, got {self.milestones}",
        )
        require(0 < self.gamma <= 1, f"dqsgd: gamma must lie in (0, 1], got {self.gamma}; 0.1 cuts the rate to a tenth")

    @property
    def cuts(self) -> bool:
        return False

    @property
    def counts(self) -> int:
        return TELLS

    @property
    def counts_each(self) -> bool:
        return self.per == "layer"

    def reach(self, recipe: Any) -> Iterable[Any]:
        codec = levelled(recipe.exchange)
        require(
            codec is not None,
            f"{self} chooses the bits of one codec with evenly spaced levels, such as qsgd(), and {recipe.exchange} has "
            "none, or two: use scatter(qsgd())",
        )
        for bits in self._widths(recipe.exchange):
            yield replace(recipe, exchange=_at(recipe.exchange, bits))

    def local(self, block: Bucket, exchange: Exchange) -> Tensor:
        codec = levelled(exchange)
        nothing = block.flat.new_zeros(len(block.layout.segments), dtype=torch.float64)
        spread = nothing if codec is None else self._spread(codec, block)
        if self.per == "model":
            return torch.stack([spread.sum(), torch.ones_like(spread[:1]).sum()])
        return torch.stack([spread, torch.ones_like(spread)], 1)

    def _spread(self, codec: Levelled, block: Bucket) -> Tensor:
        """The codec's `spread` of a bucket, as if each layer were quantised separately."""
        if self.per == "model":
            return codec.spread(block)
        marks = tuple(i for i, group in enumerate(_layers(block)) for _ in group.names)
        return codec.spread(Bucket(block.flat, block.layout.turned(marks)))

    def decide(self, facts: Facts, recipe: Any, state: State) -> Any:
        ours = [i for i, block in enumerate(facts.blocks) if not _is_ruled(block, recipe)]
        if facts.step >= self.steps or not ours:
            return recipe
        groups = self._groups([facts.blocks[i] for i in ours])
        now = np.array([_bits(recipe.routes.get(g.names[0], recipe.exchange)) for g in groups])
        sizes = np.array([float(g.size) for g in groups])
        raw = self._noises([(facts.blocks[i], facts.sums[i]) for i in ours], recipe, groups)
        wanted = self._plan(
            Demand(sizes, _averaged(raw, state)), float(raw.sum()), now, self._widths(recipe.exchange), facts, state
        )
        chosen = wanted.tolist()
        return recipe if chosen == now.tolist() else _put(recipe, groups, chosen)

    # -- what there is to choose -------------------------------------------------------------------------------------

    def _widths(self, exchange: Exchange) -> tuple[float, ...]:
        codec = levelled(exchange)
        widths = () if codec is None else codec.widths
        return tuple(w for w in widths if self.least <= w <= self.most)

    def _groups(self, blocks: Sequence[Bucket]) -> list[BitsGroup]:
        if self.per == "model":
            names = tuple(s.name for b in blocks for s in b.layout.segments)
            return [BitsGroup(names, sum(b.numel for b in blocks))]
        return [g for block in blocks for g in _layers(block)]

    def _noises(self, ours: "Sequence[tuple[Bucket, Tensor]]", recipe: Any, groups: Sequence[BitsGroup]) -> Numbers:
        """Variance of each group's mean with one level."""
        codec = levelled(recipe.exchange)
        assert codec is not None
        means = [self._spread(codec, block) if recipe.exchange.encodes_mean else None for block, _ in ours]
        told = [sums.view(-1, TELLS) for _, sums in ours]
        if self.per == "model":
            means = [None if m is None else m.sum(0, keepdim=True) for m in means]
        rows = torch.cat([t if m is None else torch.cat([t, m.view(-1, 1)], 1) for t, m in zip(told, means)])
        found = np.array(rows.tolist())  # the only transfer from the device
        ranks = found[:, 1].clip(min=1)
        noises = found[:, 0] / ranks**2 + (found[:, 2] if recipe.exchange.encodes_mean else 0.0)
        ends = np.cumsum([1 if self.per == "model" else len(g.names) for g in groups])
        if self.per == "model":
            return np.array([noises.sum() / 4])
        return np.add.reduceat(noises, [0, *ends[:-1]]) / 4

    # -- the plan ----------------------------------------------------------------------------------------------------

    def _plan(
        self, next_step: Demand, raw: float, now: Numbers, widths: Sequence[float], facts: Facts, state: State
    ) -> Numbers:
        """The bits of the next step: the first of a plan for all remaining steps."""
        left, gone = self.steps - facts.step, facts.step - int(state.get("step", 0))
        rate, law = self._rate(facts.mean_lr, state), forecast(self.steps, facts.step, raw, state)
        state["step"] = torch.tensor(facts.step)
        later = (np.arange(AHEAD) + 0.5) * (left - 1) / AHEAD + 1  # steps from the next one on
        ahead = np.concatenate([[0.0], later if left > 1 else []])
        often = np.concatenate([[1.0], np.full(AHEAD, (left - 1) / AHEAD) if left > 1 else []])
        weights = often * self._felt(facts.step, ahead, rate, law)
        demand = Demand(np.outer(often, next_step.sizes).ravel(), np.outer(weights, next_step.noises).ravel())
        groups = len(next_step.sizes)
        if self.error is None:
            spent = float(state.get("spent", 0.0)) + gone * next_step.cost(now) / next_step.sizes.sum()
            state["spent"] = torch.tensor(spent, dtype=torch.float64)
            budget = (self.bits * self.steps - spent) * next_step.sizes.sum()
            bits = within_budget(demand, budget, self.least, self.most)[:groups]
            best = of_widths(demand, budget, widths)[:groups]
            return np.where(np.abs(now - bits) <= np.abs(best - bits) + self.slack, now, best) if self.slack else best
        share = self._share(facts.mean_lr)
        made = float(state.get("made", 0.0)) * exp(-rate * gone) + gone * share * next_step.noise(now)
        state["made"] = torch.tensor(made, dtype=torch.float64)
        allowed = self.error - made * exp(-rate * self._progress(facts.step, np.array([0.0]))[0])
        bits = within_noise(demand, allowed / share if share > 0 else float("inf"), self.least, self.most)
        return np.array([self._enough(w, b, widths) for w, b in zip(bits[:groups], now, strict=True)])

    def _felt(self, step: int, ahead: Numbers, rate: float, law: Law | None) -> Numbers:
        """Weight of a step's noise in the final error, for the steps ahead: from the forecast size of gradients, the decay of noise
        by later progress, and the learning rate. Within a budget and without a forecast, only the learning rate counts.
        """
        told = 2 * log(self.gamma) * self._cuts(step + 1, ahead)
        if self.error is None:
            if law is None:
                return np.exp(told)
            ahead = np.minimum(ahead, float(step))  # as far ahead as there was to see
        grown = np.zeros_like(ahead) if law is None else law.over(step + 1, step + 1 + ahead)
        return np.exp(grown - rate * self._progress(step + 1, ahead) + told)

    def _cuts(self, step: int, ahead: Numbers) -> Numbers:
        """Number of milestones between `step` and each of the steps ahead."""
        return sum(
            (np.where((ahead + step >= m) & (m > step), 1.0, 0.0) for m in self.milestones), np.zeros_like(ahead)
        )

    def _progress(self, step: int, ahead: Numbers) -> Numbers:
        """Remaining steps after each of the steps ahead, in units of the rate at `step`; each cut makes later steps shorter."""
        lengths = self.gamma ** self._cuts(step, np.arange(self.steps - step, dtype=np.float64))
        left = np.append(np.cumsum(lengths[::-1])[::-1], 0.0)
        return np.interp(ahead + 1, np.arange(len(left)), left) if len(left) > 1 else np.zeros_like(ahead)

    def _rate(self, lr: float, state: State) -> float:
        """Decay rate of noise per step: log(1 / a), which follows the learning rate."""
        first = float(state.get("lr", 0.0)) or lr
        state["lr"] = torch.tensor(first, dtype=torch.float64)
        return -log(self.final) / self.steps * (lr / first if first > 0 else 1.0)

    def _share(self, lr: float) -> float:
        """Share of a mean's variance that is added to the loss: L lr^2 / 2."""
        return lr / 2 if self.smoothness is None else self.smoothness * lr**2 / 2

    def _enough(self, wanted: float, now: float, widths: Sequence[float]) -> float:
        """The smallest width of at least `wanted` bits, so that the error limit holds."""
        enough = next((bits for bits in widths if bits >= wanted - 1e-6), widths[-1])
        return now if enough < now < wanted + 1 + self.slack else enough


def _averaged(noises: Numbers, state: State) -> Numbers:
    """Running average over the last steps; starts again if parameters were added."""
    before = state.get("noises")
    if before is not None and before.numel() == len(noises):
        noises = SMOOTH * np.array(before.tolist()) + (1 - SMOOTH) * noises
    state["noises"] = torch.from_numpy(noises.copy())
    return noises


def _layers(block: Bucket) -> list[BitsGroup]:
    """The parameters of a bucket in groups: a small one joins the one before."""
    groups = list[BitsGroup]()
    for s in block.layout.segments:
        if groups and (s.numel < SMALL or groups[-1].size < SMALL):
            last = groups.pop()
            groups.append(BitsGroup((*last.names, s.name), last.size + s.numel))
        else:
            groups.append(BitsGroup((s.name,), s.numel))
    return groups


def _is_ruled(block: Bucket, recipe: Any) -> bool:
    """True if a rule sets the bucket's exchange: rules override controllers, and one rule holds for a whole bucket."""
    first = next(iter(block.layout.segments), None)
    return first is None or not block.numel or any(r.holds_for(first.name, first.shape) for r in recipe.rules)


def _bits(exchange: Exchange) -> float:
    codec = levelled(exchange)
    assert codec is not None
    return 1 + log2(1 + codec.steps)


@lru_cache(maxsize=1024)
def _at(exchange: Exchange, bits: float) -> Exchange:
    codec = levelled(exchange)
    assert isinstance(codec, Levelled)
    return written_by(exchange, codec.of_width(bits))


def _put(recipe: Any, groups: Sequence[BitsGroup], chosen: Sequence[float]) -> Any:
    """The recipe with the bits of most elements as its exchange, and the others as routes."""
    elements = Counter[float]()
    for group, bits in zip(groups, chosen, strict=True):
        elements[bits] += group.size
    usual = max(sorted(elements), key=lambda bits: elements[bits])
    routes = {n: _at(recipe.exchange, bits) for g, bits in zip(groups, chosen) if bits != usual for n in g.names}
    return replace(recipe, exchange=_at(recipe.exchange, usual), routes=routes)
