"""DQ-SGD: at every step as many bits as the remaining steps make worth while."""

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
from gossamer.controllers.allocation import Demand, Numbers, within_budget, within_noise
from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Controller, Exchange, Facts, Levelled
from gossamer.core.parts import part, require

AHEAD = 8  # points at which the steps to come are looked at
SMOOTH = 0.9  # how much of the norms there were stays in their average: gradients are noisy
STEEPEST = 4.0  # a power of time that is believed in
SMALL = 2048  # elements of parameters that are not worth bits of their own: they go with the one before
TELLS = 2  # numbers: how far elements are from what they are rounded against, and a one, to count ranks by


class BitsGroup(NamedTuple):
    """Parameters side by side that get the same bits, and their elements."""

    names: tuple[str, ...]
    size: int


@final
@part("dqsgd", sample="dqsgd(1000)")
class DQSGD(Controller):
    """Chooses the bits of a codec with evenly spaced levels at every step, from the norms of all ranks' gradients.

    Rounding at step t adds at most v_t = d G_t^2 / (4 s_t^2) to the mean's variance, s_t = 2^(bits - 1) - 1 levels on each side
    of zero and G_t the norms of the quantiser, over N ranks, and those of the mean where it is written again. In the end a
    fraction a^(T - t) of it is left, as progress wears it off. The least error for a budget of bits, and the fewest bits for
    an error, have sum a^(T - t) v_t smallest at  s_t^3 / (1 + s_t) = c a^(T - t) G_t^2:  with many levels s_t = k a^((T - t)
    / 2) G_t. So bits follow the norm of the gradients, and grow towards the end by half of log2(1 / a) a step.

    `bits` are those on the wire, an element's sign included and a bucket's norm not, on average over `steps`; what was spent
    is counted, and what is left is planned anew at every step. `error` asks instead for what rounding may add to the loss:
    (L lr^2 / 2) sum a^(T - t) v_t <= error, with L the `smoothness`, 1 / lr unless given; `bits` then says nothing. `final` is
    a^T, at the rate of the first step. `per="layer"` gives every parameter bits of its own, by the same rule with one c;
    those of fewer than 2048 elements go with the one before. A width is left only for one that is nearer by more than `slack`
    bits. After `steps` all stays as it is.

    The norms are those of the step before, averaged over some ten of them, and of the steps to come it is supposed that they
    go on with the power of time that they have followed so far; they and the decision are the same on all ranks.
    What is decided stands in `comm.recipe`, as the exchange and as routes. No channel is made anew for it.

    Use: around `qsgd()`, in runs whose length is known, with `per="layer"`: 3 bits then trained a small Transformer as dense did,
    where 3 bits for all lost some.

    Not for: runs of unknown length; one layer, or layers that are alike, with a norm that stays as it is.

    Wire: an all-reduce of 16 bytes a block (a parameter, with `per="layer"`) at each step.

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

    def __post_init__(self) -> None:
        require(self.steps >= 1, f"dqsgd: steps must be at least 1, got {self.steps}; say how many there will be")
        require(
            2 <= self.least <= self.most <= 8,
            f"dqsgd: least and most must be 2 <= least <= most <= 8 bits, got {self.least} and {self.most}",
        )
        require(
            self.error is not None or self.least <= self.bits <= self.most,
            f"dqsgd: bits must lie between {self.least} and {self.most}, got {self.bits}: the sign counts; change least or most",
        )
        require(self.error is None or self.error > 0, f"dqsgd: error must be positive, got {self.error}")
        require(0 < self.final <= 1, f"dqsgd: final must lie in (0, 1], got {self.final}; 1 forgets nothing")
        require(self.slack >= 0, f"dqsgd: slack must not be negative, got {self.slack}")
        require(
            self.smoothness is None or self.smoothness > 0,
            f"dqsgd: smoothness must be positive, got {self.smoothness}; leave it out for 1 / lr",
        )

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
        """In the buckets that there would be if each layer were written by itself."""
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
        noises = _averaged(self._noises([(facts.blocks[i], facts.sums[i]) for i in ours], recipe, groups), state)
        wanted = self._plan(Demand(sizes, noises), now, facts, state)
        chosen = [self._rounded(w, b, recipe.exchange) for w, b in zip(wanted, now, strict=True)]
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
        """What one level would leave to the variance of each group's mean."""
        codec = levelled(recipe.exchange)
        assert codec is not None
        means = [self._spread(codec, block) if recipe.exchange.encodes_mean else None for block, _ in ours]
        told = [sums.view(-1, TELLS) for _, sums in ours]
        if self.per == "model":
            means = [None if m is None else m.sum(0, keepdim=True) for m in means]
        rows = torch.cat([t if m is None else torch.cat([t, m.view(-1, 1)], 1) for t, m in zip(told, means)])
        found = np.array(rows.tolist())  # the one time that the host asks its device
        ranks = found[:, 1].clip(min=1)
        noises = found[:, 0] / ranks**2 + (found[:, 2] if recipe.exchange.encodes_mean else 0.0)
        ends = np.cumsum([1 if self.per == "model" else len(g.names) for g in groups])
        if self.per == "model":
            return np.array([noises.sum() / 4])
        return np.add.reduceat(noises, [0, *ends[:-1]]) / 4

    # -- the plan ----------------------------------------------------------------------------------------------------

    def _plan(self, next_step: Demand, now: Numbers, facts: Facts, state: State) -> Numbers:
        """The bits of the next step, unrounded: the first of a plan for all that are left."""
        left, gone = self.steps - facts.step, facts.step - int(state.get("step", 0))
        rate, power = self._rate(facts.lr, state), _trend(facts.step, float(next_step.noises.sum()), state)
        state["step"] = torch.tensor(facts.step)
        later = (np.arange(AHEAD) + 0.5) * (left - 1) / AHEAD + 1  # steps from the next one on
        ahead = np.concatenate([[0.0], later if left > 1 else []])
        often = np.concatenate([[1.0], np.full(AHEAD, (left - 1) / AHEAD) if left > 1 else []])
        weights = often * np.exp(-rate * (left - 1 - ahead)) * (1 + ahead / (facts.step + 1)) ** power
        demand = Demand(np.outer(often, next_step.sizes).ravel(), np.outer(weights, next_step.noises).ravel())
        if self.error is None:
            spent = float(state.get("spent", 0.0)) + gone * next_step.cost(now) / next_step.sizes.sum()
            state["spent"] = torch.tensor(spent, dtype=torch.float64)
            bits = within_budget(
                demand, (self.bits * self.steps - spent) * next_step.sizes.sum(), self.least, self.most
            )
        else:
            share = self._share(facts.lr)
            made = float(state.get("made", 0.0)) * exp(-rate * gone) + gone * share * next_step.noise(now)
            state["made"] = torch.tensor(made, dtype=torch.float64)
            allowed = self.error - made * exp(-rate * left)
            bits = within_noise(demand, allowed / share if share > 0 else float("inf"), self.least, self.most)
        return bits[: len(next_step.sizes)]

    def _rate(self, lr: float, state: State) -> float:
        """How fast progress wears noise off, per step: log(1 / a), which follows the learning rate."""
        first = float(state.get("lr", 0.0)) or lr
        state["lr"] = torch.tensor(first, dtype=torch.float64)
        return -log(self.final) / self.steps * (lr / first if first > 0 else 1.0)

    def _share(self, lr: float) -> float:
        """How much of a mean's variance the loss feels: L lr^2 / 2."""
        return lr / 2 if self.smoothness is None else self.smoothness * lr**2 / 2

    def _rounded(self, wanted: float, now: float, exchange: Exchange) -> float:
        widths = self._widths(exchange)
        if self.error is not None:  # an error is kept to, so widths are rounded up
            enough = next((bits for bits in widths if bits >= wanted - 1e-6), widths[-1])
            return now if enough < now < wanted + 1 + self.slack else enough
        nearest = min(widths, key=lambda bits: abs(bits - wanted))
        return now if abs(now - wanted) <= abs(nearest - wanted) + self.slack else nearest


def _trend(step: int, noise: float, state: State) -> float:
    """The power of time by which the noise of one level has grown so far: a line through its logarithms."""
    sums = np.array(state["trend"].tolist()) if "trend" in state else np.zeros(5)
    if noise > 0:
        x, y = log(step), log(noise)
        sums = sums + np.array([1.0, x, y, x * x, x * y])
    state["trend"] = torch.from_numpy(sums)
    count, x, y, xx, xy = sums / max(sums[0], 1.0)
    power = (xy - x * y) / (xx - x * x + 1 / max(sums[0], 1.0)) if count else 0.0  # none, until there is some to see
    return min(max(power, -STEEPEST), STEEPEST)


def _averaged(noises: Numbers, state: State) -> Numbers:
    """Over the last steps; anew if parameters have joined."""
    before = state.get("noises")
    if before is not None and before.numel() == len(noises):
        noises = SMOOTH * np.array(before.tolist()) + (1 - SMOOTH) * noises
    state["noises"] = torch.from_numpy(noises.copy())
    return noises


def _layers(block: Bucket) -> list[BitsGroup]:
    """The parameters of a block, each small one with the one before."""
    groups = list[BitsGroup]()
    for s in block.layout.segments:
        if groups and (s.numel < SMALL or groups[-1].size < SMALL):
            last = groups.pop()
            groups.append(BitsGroup((*last.names, s.name), last.size + s.numel))
        else:
            groups.append(BitsGroup((s.name,), s.numel))
    return groups


def _is_ruled(block: Bucket, recipe: Any) -> bool:
    """Rules go before a controller; a block's parameters go one way."""
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
    """What most elements get is the recipe's exchange, and the others' are routes."""
    elements = Counter[float]()
    for group, bits in zip(groups, chosen, strict=True):
        elements[bits] += group.size
    usual = max(sorted(elements), key=lambda bits: elements[bits])
    routes = {n: _at(recipe.exchange, bits) for g, bits in zip(groups, chosen) if bits != usual for n in g.names}
    return replace(recipe, exchange=_at(recipe.exchange, usual), routes=routes)
